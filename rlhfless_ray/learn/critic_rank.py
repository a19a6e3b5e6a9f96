"""One rank of the critic, which learns to predict the returns of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.losses import token_weights, value_loss
from rlhfless_ray.learn.micro_batches import MicroBatch, PromptSharing
from rlhfless_ray.learn.output_scale import output_scale
from rlhfless_ray.learn.policy_model import TokenValues, load_critic, load_divided, scalar_config
from rlhfless_ray.learn.rank_settings import CriticSettings
from rlhfless_ray.learn.rank_state import Former
from rlhfless_ray.learn.shares import Cutter, Share, ShareStep
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.learn.update_stats import merged, step_fields, without_steps
from rlhfless_ray.types import CriticStats, Span
from rlhfless_ray.weights.model_folder import DividedFiles
from rlhfless_ray.weights.tensor_file import Files

SUMS = ("loss", "values", "returns", "clipped")


class CriticRank:
    """A rank as a plain class, like the learner's. Call `open`, then `values`, then `update`."""

    def __init__(self, settings: CriticSettings) -> None:
        self.settings, self.critic, self.seed = settings, settings.critic, settings.seed % 2**63
        self.trainer = TrainerRank(settings)
        self.device = self.trainer.device
        self.sharing: PromptSharing | None = None

    def open(self, files: Files | Path | DividedFiles, rendezvous: tuple[str, int], state: dict[str, Any] | None = None) -> None:
        """Build the engine from a model folder or its files, as `LearnerRank.open` does."""
        self.trainer.join_process_group(rendezvous)
        policy = self.settings.policy
        options = policy.dtype, policy.trust_remote_code, self.critic.value_head, self.seed
        model = load_divided(files, lambda folder: load_critic(folder, *options, maps=self.trainer.stage == 3))
        scale = output_scale(model.config.to_dict(), "critic.path", "critic.normalize") if self.critic.normalize else (0.0, 1.0)
        self.sharing = PromptSharing.of(model, self.settings.learner.share_prompts, self.settings.lora.dropout)
        self.trainer.open(self.trainer.slice_sequences(TokenValues(model, *scale)), state)

    def close(self) -> Former:
        """See `TrainerRank.close`."""
        return self.trainer.close()

    @property
    def cutter(self) -> Cutter:
        """The current rules for dividing batches among the ranks."""
        max_tokens, done = self.settings.learner.max_micro_batch_tokens, self.trainer.optimizer_steps
        return Cutter(self.trainer.shares, max_tokens, self.sharing, self.settings.algorithm, self.seed, done)

    def values(self, share: Share) -> np.ndarray:
        """Return the value before every response token of the share, (response tokens,) float32. Tokens of other ranks have 0."""
        return self.trainer.passes(lambda tensors: self.trainer.engine(**tensors), share.batch, share.passes).cpu().numpy()

    def update(self, share: Share) -> CriticStats:
        """Train on the batch's `returns`. Its `values` are those that the advantages were computed with. Optimizer steps are
        divided as the policy's are."""
        return merged([self._step(share, step) for step in share.steps] or [without_steps(CriticStats, len(share))])

    def _step(self, share: Share, step: ShareStep) -> CriticStats:
        batch = share.batch
        assert batch.values is not None and batch.returns is not None
        old, returns = (torch.from_numpy(x).to(self.device) for x in (batch.values, batch.returns))
        lengths = torch.from_numpy(share.response_lengths[step.indices])
        weight = float(token_weights(lengths, "token")[0])
        sums = torch.zeros(len(SUMS), dtype=torch.float64)

        def loss_of(tensors: dict[str, Tensor], cut: MicroBatch) -> Tensor:
            wanted, values = returns[tensors["flat"]], self.trainer.engine(**tensors)
            token_loss, clipped = value_loss(values, old[tensors["flat"]], wanted, self.critic.value_clip)
            loss = token_loss.sum() * weight
            if cut:
                sums.add_(torch.stack([x.detach().double().cpu() for x in (loss, values.sum(), wanted.sum(), clipped.sum())]))
            return loss

        self.trainer.accumulate(batch, step.cuts, loss_of, numbers=share.indices)
        of_ranks, tokens = self.trainer.over_ranks(sums), int(lengths.sum())
        update = self.trainer.update(bool(torch.isfinite(of_ranks[0])))
        loss, valued, returned, clips = of_ranks.tolist()
        return CriticStats(
            loss=loss,
            value_mean=valued / tokens,
            return_mean=returned / tokens,
            clip_share=clips / tokens,
            trained_tokens=0 if update.skipped else tokens,
            **step_fields(update),
        )

    def leave_device(self) -> list[Span]:
        return self.trainer.leave_device()

    def return_to_device(self) -> list[Span]:
        return self.trainer.return_to_device()

    def config(self) -> bytes:
        """Return config.json of the critic's model."""
        return scalar_config(self.trainer.engine.module.model)
