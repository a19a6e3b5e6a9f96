"""The policy's update in float64, from the papers: one sequence at a time, whole optimizer steps, no ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.batch import Batch
from tests.fuzz.adamw import Float64AdamW
from tests.fuzz.float64_policy import Float64Policy, balance_loss
from tests.fuzz.sections import Read, of_kind

Sequence = dict[str, Any]


def sequences_of(batch: Batch) -> list[Sequence]:
    """Return each sequence's tokens, and what the batch says of its trained tokens in float64."""
    found: list[Sequence] = []
    names = "logprobs", "advantages", "old", "reference", "lags", "values", "returns"
    at = {"tokens": 0, "after": 0, "trained": 0}
    for prompt, length, group in zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), batch.groups.tolist(), strict=True):
        after = length - prompt
        mask = np.ones(after, bool) if batch.mask is None else batch.mask[at["after"] : at["after"] + after]
        trained = slice(at["trained"], at["trained"] + int(mask.sum()))
        one: Sequence = {
            "ids": batch.tokens[at["tokens"] : at["tokens"] + length].tolist(),
            "places": torch.from_numpy(prompt + np.flatnonzero(mask)),
            "group": group,
            "experts": None,
        }
        if batch.experts is not None:
            one["experts"] = torch.from_numpy(batch.experts[at["tokens"] : at["tokens"] + length].astype(np.int64))
        for name in names:
            values = getattr(batch, name)
            one[name] = None if values is None else torch.from_numpy(values[trained].astype(np.float64))
        found.append(one)
        at = {"tokens": at["tokens"] + length, "after": at["after"] + after, "trained": trained.stop}
    return found


def steps_of(batch: Batch, algorithm: Any, seed: int, done: int) -> list[list[int]]:
    """Return the sequences of each optimizer step, as `recipe.md` describes them. Draws from the same generator as the runtime."""
    if batch.steps is not None:
        return [step.tolist() for step in batch.steps]
    size, rng = algorithm.batch_samples, np.random.default_rng([seed, done])
    if size is None:
        parts = np.array_split(sorted(set(batch.groups.tolist())), algorithm.updates_per_step)
        return [[i for i, group in enumerate(batch.groups) if group in part] for part in parts] * algorithm.epochs
    steps = []
    for _ in range(algorithm.epochs):
        order = rng.permutation(len(batch)).tolist()
        steps += [order[start : start + size] for start in range(0, len(order), size)]
    keeps = of_kind(algorithm.remainder, {"short": lambda step: True, "drop": lambda step: len(step) == size})
    return [step for step in steps if keeps(step)]


@dataclass
class UpdateReference:
    """`microbatches`: "each" sequence is a micro-batch of its own, or "one" has the whole step. Only `router_aux` depends on them."""

    files: dict[str, bytes]
    algorithm: Read
    learner: Read
    temperature: float
    seed: int
    microbatches: str = "each"

    def __post_init__(self) -> None:
        self.policy = Float64Policy(self.files)
        self.initial = copy.deepcopy(self.policy)
        warmup = max(1, self.learner.warmup_steps)
        self.optimizer = Float64AdamW(
            self.policy.weights, self.learner, lambda done: self.learner.learning_rate * min(1.0, (done + 1) / warmup)
        )
        self.margin = np.inf  # distance of the nearest number to a bound where the loss jumps, for float32 to be on the same side

    def update(self, batch: Batch) -> dict[str, float]:
        """Make an update's optimizer steps. Returns the means of their statistics."""
        sequences = sequences_of(batch)
        steps = steps_of(batch, self.algorithm, self.seed, self.optimizer.done)
        coefficient = self.algorithm.kl.coefficient if batch.kl_coefficient is None else batch.kl_coefficient
        with torch.no_grad():
            for s in sequences:
                if s["old"] is None and len(steps) > 1:
                    s["old"] = self._forward(self.policy, s)[0]
                if s["reference"] is None and self.algorithm.kl.coefficient:
                    s["reference"] = self._forward(self.initial, s, replays=False)[0]
        found = [self._step([sequences[i] for i in step], coefficient) for step in steps]
        merged = {name: float(np.mean([one[name] for one in found])) for name in found[0] if not name.startswith("lag ")}
        for name in {name for one in found for name in one if name.startswith("lag ")}:
            merged[name] = float(np.mean([one[name] for one in found if name in one]))
        return merged | {
            "mismatch_max": max(one["mismatch_max"] for one in found),
            "trained_tokens": sum(one["trained_tokens"] for one in found),
        }

    def _forward(self, policy: Float64Policy, s: Sequence, replays: bool = True) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the trained tokens, and the entropies where they were drawn."""
        experts = s["experts"] if replays and self.algorithm.loss.router_replay else None
        every = torch.log_softmax(policy.outputs(s["ids"], experts)[s["places"] - 1] / self.temperature, -1)
        tokens = torch.as_tensor(s["ids"])[s["places"]]
        return every.gather(1, tokens[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def _step(self, step: list[Sequence], coefficient: float) -> dict[str, float]:
        algorithm, loss = self.algorithm, self.algorithm.loss
        counts = [len(s["places"]) for s in step]
        policy_mean = of_kind(algorithm.loss_mean, {"token": token_mean, "sequence": sequence_mean})(counts)
        own = algorithm.regularization_mean
        other_mean = policy_mean if own is None else of_kind(own, {"token": token_mean, "sequence": sequence_mean})(counts)
        sums = dict.fromkeys(("loss", "policy_loss", "kl", "router_balance"), 0.0)
        tokens: dict[str, list[Tensor]] = {}
        routers: list[list[Tensor]] = []
        whole = torch.zeros((), dtype=torch.float64)
        for s, weight, other in zip(step, policy_mean, other_mean, strict=True):
            new, entropy = self._forward(self.policy, s)
            routers.append(self.policy.router_logits)
            old = new.detach() if s["old"] is None else s["old"]
            importance, capped = self._importance(old, s["logprobs"])
            surrogate, clipped = self._surrogate(new, old, s)
            policy_loss = weight * (importance * surrogate).sum()
            kl, gap = torch.zeros_like(new), torch.zeros_like(old)
            if s["reference"] is not None:
                place = of_kind(algorithm.kl.place, {"loss": new.detach(), "reward": old})
                gap = place - s["reference"]
                if algorithm.kl.place == "loss":
                    kl = self._kl(new, s["reference"], s["old"])
            kl_loss = other * kl.sum()
            total = policy_loss + coefficient * kl_loss
            if loss.entropy_coefficient:
                total = total - loss.entropy_coefficient * other * entropy.sum()
            whole = whole + total
            for name, value in (("policy_loss", policy_loss), ("kl", kl_loss)):
                sums[name] += float(value.detach())
            ratio = torch.exp(old - s["logprobs"])
            parts = {
                "entropy": entropy, "clip_share": clipped, "importance_mean": importance, "capped": capped,
                "mismatch_mean": (old - s["logprobs"]).abs(), "ppo_kl": old - new, "sampler_kl": s["logprobs"] - old,
                "reference_gap": gap, "ratio": ratio, "square": ratio**2,
            }  # fmt: skip
            if s["lags"] is not None:
                parts |= {"lag": s["lags"], "divergence": torch.expm1(old - s["logprobs"]) - (old - s["logprobs"])}
            for name, values in parts.items():
                tokens.setdefault(name, []).append(values.detach().double())
        if loss.router_aux:
            shares = [count * other for count, other in zip(counts, other_mean, strict=True)]
            groups = of_kind(self.microbatches, {"each": [[i] for i in range(len(step))], "one": [list(range(len(step)))]})
            balance = sum(sum(shares[i] for i in g) * balance_loss([x for i in g for x in routers[i]]) for g in groups)
            whole = whole + loss.router_aux * balance
            sums["router_balance"] = float(balance.detach())
        sums["loss"] = float(whole.detach())
        if whole.requires_grad:
            whole.backward()
        rate = self.optimizer.rate(self.optimizer.done)
        return sums | self._statistics(tokens) | {"learning_rate": rate, "grad_norm": self.optimizer.step()}

    def _statistics(self, parts: dict[str, list[Tensor]]) -> dict[str, float]:
        """Return means over the step's tokens."""
        capped = parts.pop("capped")
        if self.algorithm.loss.correction_level == "seq":  # every sequence counts once
            parts["importance_capped_share"] = [x[:1] for x in capped]
        else:
            parts["importance_capped_share"] = capped
        tokens = {name: torch.cat(values) for name, values in parts.items()}
        ratio, square = tokens.pop("ratio"), tokens.pop("square")
        found = {name: float(x.mean()) for name, x in tokens.items() if name not in ("lag", "divergence")}
        if "lag" in tokens:
            of_lags = {int(lag): tokens["divergence"][tokens["lag"] == lag] for lag in tokens["lag"].unique()}
            found |= {f"lag {lag}": float(divergence.mean()) for lag, divergence in of_lags.items()}
        more = {"effective_share": float(ratio.mean() ** 2 / square.mean()), "trained_tokens": len(ratio)}
        return found | more | {"mismatch_max": float(tokens["mismatch_mean"].max())}

    def _near(self, values: Tensor, *bounds: float) -> None:
        """Remember how near these numbers are to a bound."""
        for bound in bounds:
            self.margin = min([self.margin, *(abs(values.detach() - bound) / max(abs(bound), 1e-3)).flatten().tolist()])

    def _surrogate(self, new: Tensor, old: Tensor, s: Sequence) -> tuple[Tensor, Tensor]:
        """Return PPO's or GSPO's clipped loss per token, and whether it is the clipped one."""
        algorithm, loss, advantages = self.algorithm, self.algorithm.loss, s["advantages"]
        base = of_kind(loss.ratio_to, {"learner": old, "sampler": s["logprobs"]})

        def mean_ratio() -> Tensor:
            return torch.exp((new - base).mean()).expand(len(new)) if len(new) else new

        ratios = of_kind(loss.kind, {"ppo": lambda: torch.exp(new - old), "gspo": mean_ratio})()
        low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
        self._near(ratios[advantages > 0], high)
        self._near(ratios[advantages < 0], low)
        clipped = ((advantages > 0) & (ratios > high)) | ((advantages < 0) & (ratios < low))
        bound = torch.where(advantages > 0, high, low)
        gain = torch.where(clipped, bound * advantages, ratios * advantages)
        if loss.dual_clip is not None:
            self._near(ratios[advantages < 0], loss.dual_clip)
            gain = torch.where((advantages < 0) & (gain < loss.dual_clip * advantages), loss.dual_clip * advantages, gain)
        return -gain, clipped

    def _importance(self, old: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor of each token's loss, and whether its ratio was cut or left out."""
        loss, ratios = self.algorithm.loss, torch.exp(old - sampler)
        low, high = loss.correction_low, loss.correction_high

        def capped() -> tuple[Tensor, Tensor]:
            cap = self.algorithm.importance_cap
            if not cap:
                return torch.ones_like(ratios), torch.zeros_like(ratios)
            self._near(ratios, cap)
            return torch.clamp(ratios, max=cap), ratios >= cap

        def banded(by_sequence: bool) -> tuple[Tensor, Tensor]:
            if of_kind(loss.correction_mode, {"clip": True, "mask": False}):
                self._near(ratios, low, high)
                return torch.clamp(ratios, low, high), (ratios < low) | (ratios > high)
            p, q = (x.clamp(np.log(1e-6), np.log1p(-1e-6)) for x in (sampler, old))
            statistic = of_kind(
                loss.correction_gating,
                {
                    "ratio": lambda: (old - sampler).mean().exp().expand(len(old)) if by_sequence and len(old) else ratios,
                    "binary_kl": lambda: p.exp() * (p - q) - torch.expm1(p) * (torch.log(-torch.expm1(p)) - torch.log(-torch.expm1(q))),
                    "tv": lambda: (sampler.exp() - old.exp()).abs(),
                },
            )()
            if by_sequence and loss.correction_gating != "ratio" and len(old):
                statistic = statistic.mean().expand(len(old))
            outside = statistic > high
            self._near(statistic, high)
            if loss.correction_gating == "ratio":
                self._near(statistic, low)
                outside = outside | (statistic < low)
            return torch.where(outside, 0.0, ratios), outside

        ways = {"off": capped, "token": partial(banded, False), "seq": partial(banded, True)}
        factor, changed = of_kind(loss.correction_level, ways)()
        return factor.detach(), changed

    def _kl(self, new: Tensor, reference: Tensor, old: Tensor | None) -> Tensor:
        """Return Schulman's estimates of each token, with their own gradient or with that of the KL."""
        section = self.algorithm.kl
        d = new - reference
        estimate = estimates(d, section.estimator)
        if section.limit is not None:
            self._near(estimate, -section.limit, section.limit)
            estimate = estimate.clamp(-section.limit, section.limit)
        if not section.unbiased_gradient:
            return estimate
        weight = torch.ones_like(d) if old is None else torch.exp(new - old).clamp(max=10.0)
        return estimate.detach() + (weight * d).detach() * (new - new.detach())


def estimates(d: Tensor, estimator: str) -> Tensor:
    """Return estimates of the KL from d = log π - log π_ref (Schulman 2020)."""
    ways = {"k1": lambda: d, "k2": lambda: d**2 / 2, "k3": lambda: torch.expm1(-d) + d}
    return of_kind(estimator, ways)()


def token_mean(counts: list[int]) -> list[float]:
    return [1 / sum(counts)] * len(counts)


def sequence_mean(counts: list[int]) -> list[float]:
    """Return the weight of each sequence's tokens. Sequences without trained tokens do not count."""
    with_tokens = sum(count > 0 for count in counts)
    return [1 / (count * with_tokens) if count else 0.0 for count in counts]
