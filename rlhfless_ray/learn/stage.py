"""The learning of a step: advantages, the update by the gang, and the weights it publishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from placement.policy import Decision
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.advantage import spans
from rlhfless_ray.learn.batch import Batch, batch_of, counts_of, mask_of
from rlhfless_ray.learn.credit import credit
from rlhfless_ray.learn.gang import Gang
from rlhfless_ray.learn.gangs import Gangs
from rlhfless_ray.learn.kl_controller import AdaptiveKL, FixedKL
from rlhfless_ray.learn.overlap import obstacle
from rlhfless_ray.learn.passes import StepPasses
from rlhfless_ray.learn.reward_shaping import token_kl
from rlhfless_ray.learn.update_stats import untouched
from rlhfless_ray.site import Site
from rlhfless_ray.types import Sample, UpdateStats, WeightVersion
from rlhfless_ray.waits import STOP


class LearnStage:
    def __init__(self, site: Site, gang: Gang, critic: Gang | None = None, reference: Gang | None = None) -> None:
        self.site, self.gang, self.critic = site, gang, critic
        self.gangs = Gangs(site, gang, critic, reference)
        self.number = 0  # of the step whose phase it is
        self.passes_s = 0.0  # in its phase, before the policy's update
        self.plan: Decision | None = None
        self.obstacle = obstacle(site.recipe)
        self.learned: set[int] = set()  # keys of the step's samples whose gradients have been asked for
        self.refs: list[Any] = []  # of the gradients under way
        section = site.recipe.algorithm.kl
        self.controller: FixedKL | AdaptiveKL = FixedKL(section.coefficient)
        if section.target is not None:
            self.controller = AdaptiveKL(section.coefficient, section.target, section.horizon)
        self.kl_in_reward = section.coefficient > 0 and section.place == "reward"
        self.kl = 0.0  # mean over the step's samples, where it is in the reward
        self.passes = StepPasses(site, gang, critic, reference, with_gradients=self.obstacle is None)

    # ---- ahead, while engines work ----------------------------------------------------------------------------

    def begin(self, samples: int = 0) -> None:
        """A step of so many samples begins: of the first ones there may be passes and gradients before its learn phase."""
        self.learned, self.gangs.keeps_gradients = set(), False
        self.passes.begin(samples)

    @property
    def wants_slot(self) -> bool:
        """Whether there may be work for a slot before the learn phase."""
        return self.obstacle is None or self.passes.waiting

    def fits(self, leases: list[Lease]) -> bool:
        """Whether gradients could be accumulated under these leases, without asking for more."""
        return self.obstacle is None and not self.refs and self.gang.fits(leases)

    def some(self, groups: list[list[Sample]], seconds: float) -> list[Sample]:
        """Of complete groups, about a micro-batch for each rank, if there are enough and they would be done in `seconds`."""
        most = self.site.recipe.learner.micro_batch_tokens * self.gang.ranks
        found: list[Sample] = []
        tokens, full = 0, False
        for group in filter(self.passes.let_learn, groups):
            size = sum(len(s.prompt.token_ids) + len(s.completion.token_ids) for s in group)
            if full := bool(found) and tokens + size > most:
                break
            found += group
            tokens += size
        enough = (full or tokens >= most / 2) and self.site.autoscaler.learner.predict(1, tokens) <= seconds
        return found if enough else []

    def accumulate(self, samples: list[Sample], leases: list[Lease]) -> list[Lease]:
        """Accumulate gradients of complete groups under some of the leases; returns the others."""
        self.gang.slots = self.gang.ranks
        left = self.gang.staff(leases) if not self.gang.working else leases
        self.refs = self.gang.accumulate(self.advantages(samples))
        self.gangs.keeps_gradients = True
        self.learned |= {sample.completion.key for sample in samples}
        return left

    def pending(self) -> list[Any]:
        return [*self.gang.pending(self.refs), *self.passes.pending()]

    def done_ahead(self, wait: bool = False) -> list[Lease]:
        """The leases back, once what was asked for is there. On GPU the gang keeps them: gradients stay on its devices."""
        leases = self.passes.done(wait)
        if not self.refs or (self.gang.pending(self.refs) and not wait):
            return leases
        self.gang.accumulated(self.refs)
        self.refs = []
        return [*leases, *(self.gang.park() if self.site.leases.resource == "cpu" else [])]

    # ---- the phase --------------------------------------------------------------------------------------------

    def group_of(self, sample: Sample) -> int:
        """The position of its prompt in the step."""
        return sample.completion.key // self.site.recipe.rollout.samples_per_prompt

    def advantages(self, samples: list[Sample]) -> Batch:
        """The learner's batch, of whole groups; samples without a reward and those learned ahead are not in it.

        Inside the phase: whoever has to say something of the batch before the learner learns it looks at it first.
        """
        recipe = self.site.recipe
        samples = [sample for sample in samples if sample.completion.key not in self.learned]
        rewards = np.array([np.nan if s.reward is None else s.reward for s in samples])
        known = np.isfinite(rewards)
        learned = [sample for sample, scored in zip(samples, known, strict=True) if scored]
        batch = batch_of(learned, recipe.rollout.samples_per_prompt)
        lengths = np.array([len(s.completion.token_ids) for s in samples], np.int64)
        mask = mask_of([s.action_mask for s in samples], lengths.tolist())
        scored_tokens = np.repeat(known, lengths) if mask is None else np.repeat(known, lengths) & mask
        extra: dict[str, Any] = {}
        reference, logprobs, values_of = self.passes.reference, self.passes.logprobs, self.passes.values
        told: dict[str, np.ndarray] = {}
        began_s = time.monotonic()
        if reference is not None and len(batch):
            told |= reference.of(learned, batch, self.gangs.turn)
        if logprobs is not None and len(batch) and (self.kl_in_reward or logprobs.known):
            told |= logprobs.of(learned, batch, self.gangs.turn)
        if self.kl_in_reward and len(batch):
            kl = token_kl(told["old"], told["reference"], recipe.algorithm.kl.estimator)
            self.kl = float(np.mean([kl[span].mean() for span in spans(batch.response_lengths)]))
            extra |= {"kl": _spread(kl, scored_tokens), "kl_coefficient": self.controller.coefficient}
        batch = replace(batch, **told)  # type: ignore[arg-type]
        if values_of is not None:
            values = values_of.of(learned, batch, self.gangs.turn)["values"]
            batch = replace(batch, values=values)
            extra["values"] = _spread(values, scored_tokens)
        self.passes_s += time.monotonic() - began_s
        truncated = np.array([s.completion.finish_reason == "length" for s in samples], bool)
        advantages, returns, earned = credit(
            recipe.algorithm.model_dump(), recipe.reward.model_dump(), rewards.reshape(-1, recipe.rollout.samples_per_prompt),
            lengths, truncated, recipe.rollout.max_tokens, mask=mask, **extra,
        )
        written = lengths if mask is None else counts_of(mask, lengths)
        sums = np.concatenate([[0.0], np.cumsum(np.where(scored_tokens, advantages, 0.0))])[np.cumsum(lengths)]
        means = np.diff(sums, prepend=0.0) / np.maximum(written, 1)
        for sample, scored, mean, sum_of in zip(samples, known, means, earned, strict=True):
            if scored:
                sample.advantage, sample.earned = float(mean), float(sum_of)
        by_token = {"advantages": advantages} | ({} if self.critic is None else {"returns": returns})
        return replace(
            batch, kl_coefficient=self.controller.coefficient,
            **{name: x[scored_tokens].astype(np.float32) for name, x in by_token.items()},  # type: ignore[arg-type]
        )

    @contextmanager
    def phase(self, samples: list[Sample], number: int) -> Iterator[None]:
        """Of step `number`. Rollout engines hold no lease here."""
        site, self.number, self.passes_s = self.site, number, 0.0
        with site.phases.phase("learn"):
            self.plan = site.autoscaler.size_learner(samples)
            site.spare += self.done_ahead(wait=True)
            if site.leases.resource == "cpu":  # a slot more is a thread more; on GPU a rank has one device
                for gang in self.gangs.all:
                    gang.slots = gang.ranks * self.plan.actors
            if self.gangs.alone:
                self.gangs.turn(self.gang)
            yield
            for gang in self.gangs.all:
                if gang.working:
                    site.spare += gang.park()

    def update(self, batch: Batch, samples: list[Sample], meanwhile: Callable[[], None]) -> tuple[UpdateStats, dict[str, Any]]:
        """Statistics, and metrics of the gangs. A stop signal waits for the update to end: one that is half done cannot
        be saved. `meanwhile` runs on the driver while the gang works."""
        assert self.plan is not None
        progress, coefficient = self.site.record.progress, self.controller.coefficient
        told: dict[str, Any] = {}
        with STOP.deferred(self.site.recipe.run.sigterm_s / 2, progress.message):
            began_s = time.monotonic()
            if self.critic is not None:
                self.gangs.turn(self.critic)
                of_critic = self.critic.update(batch)
                if of_critic.skipped:
                    progress.message(f"optimizer step of the critic skipped: {of_critic.reason}")
                told |= {f"critic/{name}": value for name, value in asdict(of_critic).items() if name not in ("reason", "skipped_last")}
            if not self.gangs.alone:
                self.gangs.turn(self.gang)
            if self.passes.each:
                self.site.autoscaler.observe_passes(samples, self.passes_s + time.monotonic() - began_s)
            if self.critic is not None and self.number <= self.site.recipe.critic.freeze_policy_steps:
                meanwhile()
                stats = untouched()
            else:
                began_s, restarts = time.monotonic(), self.gang.recovery.restarts
                stats = self.gang.update(batch, meanwhile, publishes=True)
                if restarts == self.gang.recovery.restarts:
                    self.site.autoscaler.observe_update(self._slots(), samples, time.monotonic() - began_s)
            if self.kl_in_reward:
                stats = replace(stats, kl=self.kl)
            if stats.applied:
                self.controller = self.controller.after(stats.kl, len(samples))
        if stats.skipped:
            progress.message(f"optimizer step skipped: {stats.reason}")
        told |= {"pool/learn_slots": self._slots() * self.gang.ranks, "pool/learn_reason": self.plan.reason}
        if self.site.recipe.algorithm.keeps_reference:
            told["learn/kl_coefficient"] = coefficient
        return stats, told

    def _slots(self) -> int:
        """Of each rank of the learner."""
        return min(len(instance.leases) for instance in self.gang.by_rank)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON."""
        return {"kl_coefficient": self.controller.coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        """An adapted coefficient goes on where it was; a fixed one is the recipe's."""
        if isinstance(self.controller, AdaptiveKL) and "kl_coefficient" in state:
            self.controller = replace(self.controller, coefficient=state["kl_coefficient"])

    def publish(self, version: int) -> WeightVersion:
        with self.site.phases.phase("publish"):
            return self.gang.publish(version)



def _spread(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Values of the chosen tokens among all tokens, 0 at the others."""
    out = np.zeros(len(chosen))
    out[chosen] = values
    return out
