"""One rank of a tenant's model: passes that add gradients, and optimizer steps, each when the client asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.micro_batches import MicroBatch, micro_batches
from rlhfless_ray.learn.optimizer_state import plain_optimizer
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_divided, load_model
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.learn.rank_state import Former
from rlhfless_ray.learn.shares import Cutter
from rlhfless_ray.learn.trainer import OptimizerStep
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.service.losses import LOSSES
from rlhfless_ray.service.work import AdamStep, PassesDone, TokenPasses
from rlhfless_ray.types import Span
from rlhfless_ray.weights.model_folder import DividedFiles
from rlhfless_ray.weights.tensor_file import Files


class ModelRank:
    """A plain class. Call `open`, then `work` for each request. Every rank makes the same calls in the same order."""

    cutter = Cutter()  # the driver divides nothing

    def __init__(self, settings: RankSettings) -> None:
        self.settings, self.trainer = settings, TrainerRank(settings)
        self.device = self.trainer.device

    def open(self, files: Files | Path | DividedFiles, rendezvous: tuple[str, int], state: dict[str, Any] | None = None) -> None:
        """Build the engine from a model folder or its files. `state`: see `read_state`. `rendezvous`: address and port of rank 0."""
        self.trainer.join_process_group(rendezvous)
        policy, divides = self.settings.policy, self.trainer.stage == 3
        model = load_divided(files, lambda folder: load_model(folder, policy.dtype, policy.trust_remote_code, maps=divides))
        with self.trainer.checking_head(model, maps=divides):
            self.trainer.open(self.trainer.slice_sequences(TokenLogprobs(model)), state, "CAUSAL_LM")

    def close(self) -> Former:
        return self.trainer.close()

    def work(self, item: TokenPasses | AdamStep) -> PassesDone | OptimizerStep:
        return self._passes(item) if isinstance(item, TokenPasses) else self._step(item)

    def _passes(self, item: TokenPasses) -> PassesDone:
        """Return the log-probabilities of the targets, and add the gradients of the loss if the passes learn."""
        inputs = {name: torch.from_numpy(x).to(self.device) for name, x in item.inputs.items()}
        targets, loss = inputs.pop("target_tokens"), LOSSES[item.loss]
        logprobs, total = torch.zeros(len(targets)), torch.zeros(1, dtype=torch.float64)

        def loss_of(tensors: dict[str, Tensor], cut: MicroBatch) -> Tensor:
            flat = tensors["flat"]
            found = self.trainer.engine(1.0, **{**tensors, "targets": targets[flat]})[0]
            each = loss.of(found, {name: x[flat] for name, x in inputs.items()}, item.config)
            if cut:
                logprobs[flat.cpu()] = found.detach().float().cpu()
                total.add_(each.detach().double().sum().cpu())
            return each.sum()

        cuts = micro_batches(
            item.batch,
            np.arange(len(item.batch)),
            self.trainer.section.max_micro_batch_tokens,
            None,
            self.settings.rank,
            self.trainer.shares,
        )
        self.trainer.accumulate(item.batch, cuts, loss_of, learns=item.learns)
        return PassesDone(self.trainer.over_ranks(logprobs).numpy(), float(self.trainer.over_ranks(total)))

    def _step(self, item: AdamStep) -> OptimizerStep:
        self.trainer.section = self.trainer.section.model_copy(
            update={"learning_rate": item.learning_rate, "grad_clip": item.grad_clip_norm}
        )
        for group in plain_optimizer(self.trainer.engine).param_groups:
            group |= {"betas": (item.beta1, item.beta2), "eps": item.eps, "weight_decay": item.weight_decay}
        return self.trainer.update(loss_is_finite=True)

    def leave_device(self) -> list[Span]:
        return self.trainer.leave_device()

    def return_to_device(self) -> list[Span]:
        return self.trainer.return_to_device()
