"""One rank of the learner, which turns batches into updates of the policy."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.image_inputs import PaddedWithImages, freeze_tower
from rlhfless_ray.learn.importance import correction_weights, importance_weights
from rlhfless_ray.learn.kl_estimators import bounded_kl, unbiased_kl
from rlhfless_ray.learn.lora import BaseModel
from rlhfless_ray.learn.losses import clipped_loss, sequence_ratios, token_ratios, token_weights
from rlhfless_ray.learn.micro_batches import MicroBatch, PromptSharing
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_divided, load_model, rounding_noise
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.learn.rank_state import Former
from rlhfless_ray.learn.shares import Cutter, Share, ShareStep
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.learn.update_stats import merged, step_fields, without_steps
from rlhfless_ray.types import Span, UpdateStats
from rlhfless_ray.weights.model_folder import DividedFiles
from rlhfless_ray.weights.tensor_file import Files

SUMS = (  # fields of UpdateStats, and then of what its share of effective samples is computed from
    *("loss", "policy_loss", "kl", "router_balance", "entropy", "clip_share", "importance_mean", "importance_capped_share"),
    *("mismatch_mean", "ppo_kl", "sampler_kl", "reference_gap", "ratio", "ratio_squared"),
)
LAGS = 9  # divergences are summed by lag: 0 to 8 updates, the largest `rollout.max_lag_steps`
WEIGHTED = 4  # the first so many of SUMS are weighted like the loss; the others count every token the same


class LearnerRank:
    """A rank as a plain class. Runs wrap it in a Ray actor, which sets the number of threads; tests call it directly."""

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.learner, self.algorithm, self.seed = settings.learner, settings.algorithm, settings.seed % 2**63
        self.trainer = TrainerRank(settings)
        self.device = self.trainer.device
        self.sharing: PromptSharing | None = None
        self.base: BaseModel | None = None  # the reference model, if only adapters are trained

    # ---- life -------------------------------------------------------------------------------------------------

    def open(self, files: Files | Path | DividedFiles, rendezvous: tuple[str, int], state: dict[str, Any] | None = None) -> None:
        """Build the engine from a model folder or its files. `state` (see `read_state`) continues a stopped run.

        `rendezvous`: address and port of rank 0.
        """
        self.trainer.join_process_group(rendezvous)
        policy, divides = self.settings.policy, self.trainer.stage == 3

        def load(folder: Path) -> Any:
            self.trainer.tensors_of = PaddedWithImages(folder)
            return load_model(folder, policy.dtype, policy.trust_remote_code, maps=divides)

        model = load_divided(files, load)
        if not self.learner.train_vision:
            freeze_tower(model.base_model)
        with self.trainer.checking_head(model, maps=divides):
            self.sharing = PromptSharing.of(model, self.learner.share_prompts, self.settings.lora.dropout)
            loss = self.algorithm.loss
            wrapped = self.trainer.slice_sequences(TokenLogprobs(model, balances=bool(loss.router_aux), replays=loss.router_replay))
            self.trainer.open(wrapped, state, "CAUSAL_LM")
        if self.trainer.lora is not None:
            self.base = BaseModel(self.trainer.engine, self.trainer.lora)

    def close(self) -> Former:
        """See `TrainerRank.close`."""
        self.base = None
        return self.trainer.close()

    # ---- the update -------------------------------------------------------------------------------------------

    @property
    def cutter(self) -> Cutter:
        """The current rules for dividing batches among the ranks."""
        max_tokens, done = self.learner.max_micro_batch_tokens, self.trainer.optimizer_steps
        return Cutter(self.trainer.shares, max_tokens, self.sharing, self.algorithm, self.seed, done, self.trainer.drops)

    def update(self, share: Share) -> UpdateStats:
        """Make the optimizer steps of one rollout batch, of which this rank has its share."""
        old = self._old(share)
        return merged([self._step(share, step, old) for step in share.steps] or [without_steps(UpdateStats, len(share))])

    def _weights(self, lengths: Tensor) -> np.ndarray:
        """Return the weights of each sequence's tokens in the policy loss, and in KL loss and entropy bonus: (2, sequences) float64."""
        means = self.algorithm.loss_mean, self.algorithm.regularization_mean or self.algorithm.loss_mean
        return np.stack([token_weights(lengths, mean).numpy() for mean in means])

    def logprobs(self, share: Share, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Return log-probabilities of the share's tokens before a step, by name (see `overlap_rules.passes`).

        Each array is (response tokens,) float32, with 0 for tokens that another rank computes.
        """
        modules = {"old": self.trainer.engine, "reference": self.base}
        return {name: self._passed(modules[name], share).cpu().numpy() for name in names}

    def agreement(self, share: Share, temperature: float, top_p: float, top_k: int = 0, noisy: bool = False) -> np.ndarray:
        """Return log-probabilities of the share's tokens in the distribution that an engine with these settings draws from.

        The result is (response tokens,) float32, as in `logprobs`. `noisy`: see `rounding_noise`.
        """
        with rounding_noise(self.trainer.engine.module.model) if noisy else nullcontext():
            drawn_from = temperature, top_p, top_k
            logprobs = self.trainer.passes(lambda tensors: self.trainer.engine(*drawn_from, **tensors)[0], share.batch, share.passes)
        return logprobs.cpu().numpy()

    def _old(self, share: Share) -> Tensor | None:
        """Return log-probabilities under the weights before the first optimizer step. None: those are the current weights."""
        if share.batch.old is not None:
            return torch.from_numpy(share.batch.old).to(self.device)
        if not share.needs_old:
            return None
        places = torch.from_numpy(share.tokens)
        logprobs = torch.zeros(int(share.response_lengths.sum()))
        logprobs[places] = self._passed(self.trainer.engine, share).cpu()
        return self.trainer.over_ranks(logprobs)[places].to(self.device)

    def _passed(self, module: torch.nn.Module, share: Share) -> Tensor:
        """Return log-probabilities of the share's tokens, (response tokens,), with 0 for tokens that another rank computes."""
        return self.trainer.passes(lambda tensors: self._forward(module, tensors)[0], share.batch, share.passes)

    def _forward(self, module: Any, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if module is self.base:  # the reference's routers choose by themselves
            tensors = {name: tensor for name, tensor in tensors.items() if name != "experts"}
        return module(self.settings.temperature, **tensors)

    def _step(self, share: Share, step: ShareStep, old: Tensor | None) -> UpdateStats:
        lengths = torch.from_numpy(share.response_lengths[step.indices])
        weight_of = np.zeros((2, len(share)))
        weight_of[:, step.indices] = self._weights(lengths)
        return self._apply(self._backward(share, step, old, weight_of[:, share.indices]))

    def _backward(self, share: Share, step: ShareStep, old: Tensor | None, weight_of: np.ndarray) -> _Sums:
        """Add the gradients of a step's sequences. `weight_of` (2, sequences of the share): see `_weights`."""
        batch = share.batch
        weights = torch.from_numpy(weight_of).float().to(self.device)
        tokens = {name: torch.from_numpy(x).to(self.device) for name, x in (("advantages", batch.advantages), ("drawn", batch.logprobs))}
        if old is not None:
            tokens["old"] = old
        if batch.reference is not None:
            tokens["reference"] = torch.from_numpy(batch.reference).to(self.device)
        if batch.lags is not None:
            tokens["lags"] = torch.from_numpy(batch.lags).long().to(self.device)
        kl_coefficient = self.algorithm.kl.coefficient if batch.kl_coefficient is None else batch.kl_coefficient
        sums = torch.zeros(len(SUMS) + 2 * LAGS, dtype=torch.float64)
        max_mismatch = torch.zeros(1, dtype=torch.float64)

        def loss_of(tensors: dict[str, Tensor], cut: MicroBatch) -> Tensor:
            mine = {name: x[tensors["flat"]] for name, x in tokens.items()}
            loss, values, worst = self._micro_loss(tensors, weights[:, tensors["sequence"]], mine, len(batch), kl_coefficient)
            if cut:
                sums.add_(values)
                max_mismatch.copy_(torch.maximum(max_mismatch, worst))
            return loss

        self.trainer.accumulate(batch, step.cuts, loss_of, numbers=share.indices)
        lengths = share.response_lengths[step.indices]
        return _Sums(sums, max_mismatch, int(lengths.sum()), int((lengths > 0).sum()))

    def _apply(self, accumulated: _Sums) -> UpdateStats:
        """Make the optimizer step with the accumulated gradients."""
        sums, max_mismatch = self.trainer.over_ranks(accumulated.sums), self.trainer.over_ranks(accumulated.max_mismatch, largest=True)
        update = self.trainer.update(bool(torch.isfinite(sums[0])))
        divergence, of_lag = sums[len(SUMS) :].view(2, LAGS)
        sums[WEIGHTED : len(SUMS)] /= accumulated.tokens  # statistics are means over tokens, whatever the loss averages over
        named = dict(zip(SUMS, sums[: len(SUMS)].tolist(), strict=True))
        ratio, ratio_squared = named.pop("ratio"), named.pop("ratio_squared")
        if self.algorithm.loss.correction_level == "seq":
            named["importance_capped_share"] *= accumulated.tokens / accumulated.sequences
        return UpdateStats(
            **named,
            mismatch_max=float(max_mismatch),
            trained_tokens=0 if update.skipped else accumulated.tokens,
            next_learning_rate=update.next_learning_rate,
            last_grad_norm=update.grad_norm,
            **step_fields(update),
            effective_share=ratio**2 / ratio_squared if ratio_squared else 0.0,
            kl_by_lag={lag: float(divergence[lag] / count) for lag, count in enumerate(of_lag.tolist()) if count},
        )

    def _micro_loss(
        self, tensors: dict[str, Tensor], weight: Tensor, mine: dict[str, Tensor], sequences: int, kl_coefficient: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted loss of one micro-batch, its part of SUMS, and its largest mismatch.

        `weight` (2, tokens): see `_weights`. `mine`: arrays of the micro-batch's tokens, by name.
        """
        algorithm, sequence = self.algorithm, tensors["sequence"]
        weight, regularization_weight = weight
        # before the policy's forward pass, because nothing may come between that and its backward pass
        reference = self._reference(tensors, mine)
        logprobs, entropy, *routers = self._forward(self.trainer.engine, tensors)
        drawn, before = mine["drawn"], mine.get("old", logprobs.detach())
        if algorithm.loss.correction_level == "off":
            cap = algorithm.importance_cap
            importance = importance_weights(before, drawn, cap)
            capped = (importance >= cap) if cap else torch.zeros_like(drawn, dtype=torch.bool)
        else:
            importance, capped = correction_weights(algorithm.loss, before, drawn, sequence, sequences)
            if algorithm.loss.correction_level == "seq":
                capped = capped / torch.bincount(sequence)[sequence]  # each sequence counts once
        gspo = algorithm.loss.kind == "gspo"
        base = drawn if algorithm.loss.ratio_to == "sampler" else before
        ratios = sequence_ratios(logprobs, base, sequence, sequences) if gspo else token_ratios(logprobs, before)
        token_loss, clipped = clipped_loss(ratios, mine["advantages"], algorithm.clip_low, algorithm.clip_high, algorithm.loss.dual_clip)
        policy_loss = (weight * importance * token_loss).sum()
        kl = torch.zeros((), device=self.device)
        gap = torch.zeros_like(drawn)
        if reference is not None:
            in_loss = algorithm.kl.place == "loss"
            if in_loss:
                kl = (regularization_weight * self._kl(logprobs, reference, mine.get("old"))).sum()
            gap = (logprobs.detach() if in_loss else before) - reference
        loss = policy_loss + kl_coefficient * kl
        if algorithm.loss.entropy_coefficient:
            loss = loss - algorithm.loss.entropy_coefficient * (regularization_weight * entropy).sum()
        balance = torch.zeros((), device=self.device)
        if routers:  # weighted by the micro-batch's share of the step's regularization
            balance = regularization_weight.sum() * routers[0]
            loss = loss + algorithm.loss.router_aux * balance
        mismatch = (before - drawn).abs()
        each = weight > 0
        ratio = token_ratios(before, drawn).double()
        apart = (before - logprobs.detach(), drawn - before, gap, ratio, ratio.square())
        terms = [loss, policy_loss, kl, balance, *((each * x).sum() for x in (entropy, clipped, importance, capped, mismatch, *apart))]
        by_lag = torch.zeros(2, LAGS, dtype=torch.float64, device=self.device)
        if "lags" in mine:
            divergence = bounded_kl(drawn, before, "k3", limit=None).double()
            by_lag.index_add_(1, mine["lags"], torch.stack([each * divergence, each.double()]))
        values = torch.cat([torch.stack([t.detach().double().cpu() for t in terms]), by_lag.flatten().cpu()])
        worst = mismatch.max().detach().double().cpu() if mismatch.numel() else torch.zeros(1).double()
        return loss, values, worst

    def _reference(self, tensors: dict[str, Tensor], mine: dict[str, Tensor]) -> Tensor | None:
        """Return log-probabilities under the initial policy if they are known or the loss has a KL to it, or else None."""
        kl = self.algorithm.kl
        if "reference" in mine:
            return mine["reference"]
        if not kl.coefficient or kl.place != "loss":
            return None
        if self.base is None:
            raise ValueError("the loss has a KL term, but the batch has no log-probabilities of the reference")
        with torch.no_grad():
            return self._forward(self.base, tensors)[0]

    def _kl(self, logprobs: Tensor, reference: Tensor, old: Tensor | None) -> Tensor:
        section = self.algorithm.kl
        if section.unbiased_gradient:
            return unbiased_kl(logprobs, reference, old, section.estimator, section.limit)
        return bounded_kl(logprobs, reference, section.estimator, section.limit)

    # ---- between updates --------------------------------------------------------------------------------------

    def leave_device(self) -> list[Span]:
        return self.trainer.leave_device()

    def return_to_device(self) -> list[Span]:
        return self.trainer.return_to_device()


@dataclass(frozen=True)
class _Sums:
    """Sums over the backward passes of this rank."""

    sums: torch.Tensor  # SUMS, then divergence and tokens by lag
    max_mismatch: torch.Tensor
    tokens: int  # of the whole batch
    sequences: int  # of the whole batch, that have tokens
