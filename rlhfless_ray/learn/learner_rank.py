"""One rank of the learner, which turns batches into updates of the policy."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.importance import Correction, correction_weights
from rlhfless_ray.learn.kl_estimators import bounded_kl, unbiased_kl
from rlhfless_ray.learn.lora import BaseModel, LoraAdapters
from rlhfless_ray.learn.losses import clipped_loss, importance_weights, sequence_ratios, token_ratios, token_weights
from rlhfless_ray.learn.micro_batch_tensors import padded, passed
from rlhfless_ray.learn.micro_batches import PromptSharing
from rlhfless_ray.learn.overlap_rules import inexact
from rlhfless_ray.learn.policy_model import TokenLogprobs, check_head, load_model, rounding_noise, token_logprobs
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.learn.shares import Cutter, Share, ShareStep
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.learn.update_stats import merged, nothing, untouched
from rlhfless_ray.types import Span, UpdateStats
from rlhfless_ray.weights.model_folder import as_folder
from rlhfless_ray.weights.tensor_file import Files

SUMS = (
    *("loss", "policy_loss", "kl", "router_balance", "entropy", "clipped", "importance", "capped", "mismatch", "ppo_kl"),
    *("sampler_kl", "reference_gap", "ratio", "ratio_squared"),
)
LAGS = 9  # kinds of tokens whose divergence is summed apart: 0 to 8 updates old, the largest `rollout.max_lag_steps`
WEIGHTED = 4  # of SUMS, the first ones: weighted as the loss is; the others count every token the same


class LearnerRank:
    """A plain class: runs wrap it in a Ray actor, tests and debuggers call it directly."""

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.learner, self.algorithm, self.seed = settings.learner, settings.algorithm, settings.seed % 2**63
        self.rank, self.ranks = settings.rank, settings.learner.ranks
        self.trainer = TrainerRank(settings)
        self.device = self.trainer.device
        loss = self.algorithm.loss
        self.correction = Correction.of_flags(
            loss.correction_level, loss.correction_mode, loss.correction_gating, (loss.correction_low, loss.correction_high)
        )
        self.sharing: PromptSharing | None = None
        self.early: _Sums | None = None  # of groups whose gradients were accumulated before their step was complete
        self.base: BaseModel | None = None  # the reference, where adapters alone are trained

    # ---- life -------------------------------------------------------------------------------------------------

    def open(self, files: Files | Path, rendezvous: tuple[str, int], threads: int, state: dict[str, Any] | None = None) -> list[Span]:
        """Build the engine from a model folder or its files; `state` (see `read_state`) continues a stopped run.

        rendezvous: address and port of rank 0.
        """
        start = time.time()
        torch.set_num_threads(threads)
        self.trainer.join_gang(rendezvous)
        with as_folder(files) as folder:
            policy = self.settings.policy
            model = load_model(folder, policy.dtype, policy.trust_remote_code)
            check_head(model)
        section = self.settings.lora
        self.sharing = PromptSharing.of(model, self.learner.share_prompts, section.dropout)
        lora = LoraAdapters(model, section, self.seed, "CAUSAL_LM") if section.rank else None
        self.trainer.open(TokenLogprobs(model, balances=bool(self.algorithm.loss.router_aux)), state, lora)
        if lora is not None:
            self.base = BaseModel(self.trainer.engine, lora)
        return [Span("start", "open learner", start, time.time())]

    # ---- the update -------------------------------------------------------------------------------------------

    @property
    def cutter(self) -> Cutter:
        """How the batches of all ranks are cut now."""
        most, done = self.learner.max_micro_batch_tokens, self.trainer.optimizer_steps
        return Cutter(self.trainer.replicas, most, self.sharing, self.algorithm, self.seed, done, self.trainer.drops)

    def update(self, share: Share, threads: int) -> tuple[UpdateStats, list[Span]]:
        """Make the optimizer steps of one rollout batch, of which this rank has its share."""
        start = time.time()
        torch.set_num_threads(threads)
        if self.early is not None:
            return self._finish_early(share), [Span("work", "update", start, time.time())]
        if len(share) == 0:
            return nothing(UpdateStats, "no sample of the step has a reward"), [Span("work", "update", start, time.time())]
        old = self._old(share)
        stats = [self._step(share, step, old) for step in share.steps] or [untouched(UpdateStats)]
        return merged(stats), [Span("work", "update", start, time.time())]

    def accumulate(self, share: Share, threads: int) -> list[Span]:
        """Gradients of groups that are complete while others of their step are still being answered. `update` with the others
        then makes the step, which is that of the whole batch to rounding: gradients add up, and are divided by the step's
        tokens (or sequences) once these are known.

        Raises ValueError where that does not hold.
        """
        if reason := inexact(self.algorithm, self.learner, self.settings.lora):
            raise ValueError(reason)
        start = time.time()
        torch.set_num_threads(threads)
        if len(share):
            found = self._unscaled(share)
            self.early = found if self.early is None else self.early.plus(found)
        return [Span("work", "accumulate", start, time.time())]

    def _finish_early(self, share: Share) -> UpdateStats:
        assert self.early is not None
        whole, self.early = self.early, None
        if len(share):
            whole = whole.plus(self._unscaled(share))
        return self._made(whole, 1 / whole.whole)

    def _unscaled(self, share: Share) -> _Sums:
        """Backward passes over the whole batch, with weights that do not depend on what else the step holds."""
        (step,) = share.steps
        lengths = torch.from_numpy(share.response_lengths)
        whole = float(lengths.sum() if self.algorithm.loss_mean == "token" else len(lengths))
        return self._backward(share, step, None, self._weights(lengths)[:, share.indices] * whole, whole)

    def _weights(self, lengths: Tensor) -> np.ndarray:
        """Weights of each sequence's tokens in the policy loss and in KL loss and entropy bonus: (2, sequences) float64."""
        means = self.algorithm.loss_mean, self.algorithm.regularization_mean or self.algorithm.loss_mean
        return np.stack([token_weights(lengths, mean).numpy() for mean in means])

    def logprobs(self, share: Share, names: tuple[str, ...], threads: int) -> tuple[dict[str, np.ndarray], list[Span]]:
        """Before a step, by name (see `overlap.passes`), of the share's tokens, 0 where another rank computes them: each
        (response tokens,) float32."""
        start = time.time()
        torch.set_num_threads(threads)
        modules = {"old": self.trainer.engine, "reference": self.base}
        found = {name: self._passed(modules[name], share).cpu().numpy() for name in names}
        return found, [Span("work", "log-probabilities", start, time.time())]

    def agreement(self, share: Share, temperature: float, top_p: float, threads: int, noisy: bool = False) -> tuple[np.ndarray, list[Span]]:
        """Log-probabilities in the distribution that an engine with these settings draws from, of the tokens that `logprobs` has:
        (response tokens,) float32. `noisy`: see `rounding_noise`."""
        start = time.time()
        torch.set_num_threads(threads)
        with rounding_noise(self.trainer.engine.module.model) if noisy else nullcontext():
            found = passed(
                lambda tensors: token_logprobs(self.trainer.engine, tensors, temperature, top_p)[0], share.batch, share.passes, self.device
            )
        return found.cpu().numpy(), [Span("work", "check agreement", start, time.time())]

    def _old(self, share: Share) -> Tensor | None:
        """Log-probabilities of the share's tokens under the weights before the first optimizer step. None: they are those of now."""
        if share.batch.old is not None:
            return torch.from_numpy(share.batch.old).to(self.device)
        if not share.needs_old:
            return None
        own = torch.from_numpy(share.tokens)
        found = torch.zeros(int(share.response_lengths.sum()))
        found[own] = self._passed(self.trainer.engine, share).cpu()
        return self.trainer.over_ranks(found)[own].to(self.device)

    def _passed(self, module: Any, share: Share) -> Tensor:
        """Log-probabilities of the share's tokens, 0 where another rank computes them: (response tokens,)."""
        return passed(lambda tensors: self._forward(module, tensors)[0], share.batch, share.passes, self.device)

    def _forward(self, module: Any, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return token_logprobs(module, tensors, self.settings.temperature)

    def _step(self, share: Share, step: ShareStep, old: Tensor | None) -> UpdateStats:
        lengths = torch.from_numpy(share.response_lengths[step.indices])
        weight_of = np.zeros((2, len(share)))
        weight_of[:, step.indices] = self._weights(lengths)
        return self._made(self._backward(share, step, old, weight_of[:, share.indices], 1.0), 1.0)

    def _backward(self, share: Share, step: ShareStep, old: Tensor | None, weight_of: np.ndarray, whole: float) -> _Sums:
        """Add the gradients of a step's sequences. `weight_of` (2, sequences of the share): see `_weights`; `whole`: what the weights
        are to be divided by in the end."""
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
        most = torch.zeros(1, dtype=torch.float64)
        for cut in step.cuts:
            # A rank without work still joins the collectives: one sequence at weight 0.
            rows = cut or [np.arange(1)]
            tensors = padded(batch, rows, self.device)
            weight = weights[:, tensors["sequence"]] if cut else torch.zeros(2, len(tensors["flat"]), device=self.device)
            mine = {name: x[tensors["flat"]] for name, x in tokens.items()}
            with self.trainer.dropping(batch, np.concatenate(rows), self.seed, share.indices):
                loss, values, worst = self._micro_loss(tensors, weight, mine, len(batch), kl_coefficient)
                self.trainer.backward(loss)
            sums += values
            if cut:
                most = torch.maximum(most, worst)
        return _Sums(sums, most, int(share.response_lengths[step.indices].sum()), len(step.indices), whole)

    def _made(self, found: _Sums, scale: float) -> UpdateStats:
        """The optimizer step on what was accumulated; `scale`: of gradients and weighted sums."""
        sums, most = self.trainer.over_ranks(found.sums), self.trainer.over_ranks(found.most, largest=True)
        rate = self.trainer.rate()
        norm, applied, reason = self.trainer.step(bool(torch.isfinite(sums[0])), scale)
        sums[:WEIGHTED] *= scale
        divergence, of_lag = sums[len(SUMS) :].view(2, LAGS)
        sums[WEIGHTED : len(SUMS)] /= found.tokens  # statistics are means over tokens, whatever the loss averages over
        named = dict(zip(SUMS, sums[: len(SUMS)].tolist(), strict=True))
        effective = named["ratio"] ** 2 / named["ratio_squared"] if named["ratio_squared"] else 0.0
        if self.correction is not None and self.correction.gates_sequences:
            named["capped"] *= found.tokens / found.sequences
        return UpdateStats(
            loss=named["loss"],
            policy_loss=named["policy_loss"],
            kl=named["kl"],
            entropy=named["entropy"],
            clip_share=named["clipped"],
            importance_mean=named["importance"],
            importance_capped_share=named["capped"],
            mismatch_mean=named["mismatch"],
            mismatch_max=float(most),
            grad_norm=norm,
            learning_rate=rate,
            trained_tokens=found.tokens if applied else 0,
            skipped=int(not applied),
            reason=reason,
            applied=int(applied),
            skipped_last=int(not applied),
            ppo_kl=named["ppo_kl"],
            sampler_kl=named["sampler_kl"],
            reference_gap=named["reference_gap"],
            next_learning_rate=self.trainer.rate(),
            last_grad_norm=norm,
            effective_share=effective,
            router_balance=named["router_balance"],
            kl_by_lag={lag: float(divergence[lag] / count) for lag, count in enumerate(of_lag.tolist()) if count},
        )

    def _micro_loss(
        self, tensors: dict[str, Tensor], weight: Tensor, mine: dict[str, Tensor], sequences: int, kl_coefficient: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss of one micro-batch, its part of SUMS and the largest mismatch. `weight` (2, tokens): see `_weights`;
        `mine`: what is known of its tokens."""
        algorithm, sequence = self.algorithm, tensors["sequence"]
        weight, regularization_weight = weight
        # before the policy's: nothing may come between a forward pass and its backward one
        reference = self._reference(tensors, mine)
        logprobs, entropy, *routers = self._forward(self.trainer.engine, tensors)
        drawn, before = mine["drawn"], mine.get("old", logprobs.detach())
        if self.correction is None:
            cap = algorithm.importance_cap
            importance = importance_weights(before, drawn, cap)
            capped = (importance >= cap) if cap else torch.zeros_like(drawn, dtype=torch.bool)
        else:
            importance, capped = correction_weights(self.correction, before, drawn, sequence, sequences)
            if self.correction.gates_sequences:
                capped = capped / torch.bincount(sequence)[sequence]
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
        if routers:  # the micro-batch's share of the step, as its tokens have it in the regularization
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
        """Log-probabilities under the policy the run began with, where they are known or the loss has a KL to it."""
        kl = self.algorithm.kl
        if "reference" in mine:
            return mine["reference"]
        if not kl.coefficient or kl.place != "loss":
            return None
        if self.base is None:
            raise ValueError("the loss has a KL, and the batch no log-probabilities of the reference")
        with torch.no_grad():
            return self._forward(self.base, tensors)[0]

    def _kl(self, logprobs: Tensor, reference: Tensor, old: Tensor | None) -> Tensor:
        section = self.algorithm.kl
        if section.unbiased_gradient:
            return unbiased_kl(logprobs, reference, old, section.estimator, section.limit)
        return bounded_kl(logprobs, reference, section.estimator, section.limit)

    # ---- what others take -------------------------------------------------------------------------------------

    def weights(self) -> tuple[dict[str, np.ndarray] | None, list[Span]]:
        """{parameter name: array} for the engines, from rank 0; the other ranks take part and return None."""
        start = time.time()
        return self.trainer.weights(), [Span("transfer", "publish weights", start, time.time())]

    # ---- between updates --------------------------------------------------------------------------------------

    def leave_device(self) -> list[Span]:
        if self.early is not None:
            raise RuntimeError("the learner holds gradients of a step that is not complete: they would be lost with its device")
        return self.trainer.leave_device()

    def return_to_device(self) -> list[Span]:
        return self.trainer.return_to_device()


@dataclass(frozen=True)
class _Sums:
    """What backward passes added up on this rank: SUMS, the largest mismatch; of the whole batch tokens and sequences; and what the
    weights are divided by."""

    sums: torch.Tensor
    most: torch.Tensor
    tokens: int
    sequences: int
    whole: float

    def plus(self, other: _Sums) -> _Sums:
        most = torch.maximum(self.most, other.most)
        counts = self.tokens + other.tokens, self.sequences + other.sequences
        return _Sums(self.sums + other.sums, most, *counts, self.whole + other.whole)
