"""What a gang says of samples before the update: learner and reference their log-probabilities, the critic its values.

It hangs on a sample and the step's weights only. So samples that have ended are looked at while others are still being answered,
on slots that engines have left; in the learn phase the others follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.advantage import spans
from rlhfless_ray.learn.batch import Batch, batch_of
from rlhfless_ray.learn.overlap_rules import passes, passes_obstacle
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Sample

WORTH = 4  # a fourth of a step's samples is worth a pass of its own, however few tokens they have


class Passes:
    """`begin` → (`heard` → `look` → `done`) … → `of`, once a step."""

    def __init__(self, context: RunContext, worker_group: WorkerGroup, what: str, names: tuple[str, ...], ahead: bool) -> None:
        """`what`: the gang's call, `logprobs` with the names of what it is to give (see `overlap.passes`), `reference` or `values`.
        `ahead`: whether samples are looked at before the learn phase."""
        self.context, self.worker_group, self.what, self.names, self.ahead = context, worker_group, what, names, ahead
        self.more = (names,) if what == "logprobs" else ()
        self.per_token_s: float | None = None  # of a pass under one lease a rank, as measured
        self.begin(0)

    def begin(self, samples: int) -> None:
        """A step of so many samples begins."""
        self.samples = samples
        self.waiting: list[Sample] = []
        self.asked: list[Sample] = []  # by `refs`
        self.refs: list[Any] = []
        self.known: dict[int, dict[str, np.ndarray]] = {}  # key → name → of its tokens

    # ---- ahead, while engines work ----------------------------------------------------------------------------

    def heard(self, samples: list[Sample]) -> None:
        """These have come to their end."""
        if self.ahead:
            self.waiting += samples

    def look(self, leases: list[Lease], seconds: float) -> list[Lease]:
        """Begin with some that wait, under some of the leases, if they would be done in `seconds`; returns the other leases."""
        if self.refs or not self.waiting or not self.worker_group.fits(leases):
            return leases
        count, tokens = self._some(seconds)
        if not count:
            return leases
        self.asked, self.waiting = self.waiting[:count], self.waiting[count:]
        self.worker_group.slots = self.worker_group.ranks
        left = self.worker_group.assign_leases(leases) if not self.worker_group.working else leases
        self.tokens = tokens
        self.refs = self.worker_group.ask(self.what, self._batch(self.asked), *self.more)
        return left

    def _some(self, seconds: float) -> tuple[int, int]:
        """How many of those that wait: about a micro-batch for each rank, if that is worth it and fits; and their tokens."""
        most = self.context.recipe.learner.micro_batch_tokens * self.worker_group.ranks
        count = tokens = 0
        full = False
        for sample in self.waiting:
            size = len(sample.prompt.token_ids) + len(sample.completion.token_ids)
            if full := count > 0 and tokens + size > most:
                break
            count, tokens = count + 1, tokens + size
        worth = full or 2 * tokens >= most or WORTH * count >= self.samples
        return (count, tokens) if worth and self._takes_s(tokens) <= seconds else (0, 0)

    def _takes_s(self, tokens: int) -> float:
        """Before one was measured: what a whole update would take."""
        return self.context.autoscaler.learner.predict(1, tokens) if self.per_token_s is None else self.per_token_s * tokens

    def pending(self) -> list[Any]:
        return self.worker_group.pending(self.refs)

    def done(self, wait: bool = False) -> list[Lease]:
        """The leases back, once what was asked for is there. On GPU the gang keeps them: it has work on its devices soon."""
        if not self.refs or (self.pending() and not wait):
            return []
        refs, self.refs = self.refs, []
        if (answer := self.worker_group.answered(refs, self.what)) is not None:
            found, took_s = answer
            self.per_token_s = took_s / max(1, self.tokens)
            for sample, span in zip(self.asked, spans(self._batch(self.asked).response_lengths), strict=True):
                self.known[sample.completion.key] = {name: found[name][span] for name in self.names}
        self.asked = []
        return self.worker_group.park() if self.context.leases.resource == "cpu" else []

    def _batch(self, samples: list[Sample]) -> Batch:
        return batch_of(samples, self.context.recipe.rollout.samples_per_prompt)

    # ---- the learn phase --------------------------------------------------------------------------------------

    def of(self, samples: list[Sample], batch: Batch, turn: Callable[[WorkerGroup], None]) -> dict[str, np.ndarray]:
        """By name, per response token of `batch`, which is of these samples. Those that are not known yet are asked for now; `turn`
        gives the gang its leases."""
        keys = [sample.completion.key for sample in samples]
        later = np.array([i for i, key in enumerate(keys) if key not in self.known], np.int64)
        told = {key: self.known[key] for key in keys if key in self.known}
        if len(later):
            turn(self.worker_group)
            part = batch if len(later) == len(batch) else batch.take(later)
            found = self.worker_group.passed(self.what, part, *self.more)
            if part is batch:
                return found
            for i, span in zip(later, spans(part.response_lengths), strict=True):
                told[keys[i]] = {name: found[name][span] for name in self.names}
        empty = np.zeros(0, np.float32)
        return {name: np.concatenate([empty, *(told[key][name] for key in keys)]) for name in self.names}


class StepPasses:
    """Those of reference, learner and critic, as far as the recipe wants them."""

    def __init__(
        self,
        context: RunContext,
        worker_group: WorkerGroup,
        critic: WorkerGroup | None,
        reference: WorkerGroup | None,
        *,
        with_gradients: bool,
    ) -> None:
        """`with_gradients`: gradients go ahead, and with them what they need of the learner."""
        recipe = context.recipe
        self.obstacle = passes_obstacle(recipe)
        self.reference: Passes | None = None
        self.logprobs: Passes | None = None
        self.values: Passes | None = None
        if reference is not None:
            self.reference = Passes(context, reference, "reference", ("reference",), self.obstacle is None)
        samples = recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt
        names = () if with_gradients else passes(recipe.algorithm, recipe.lora, samples)
        if names:
            self.logprobs = Passes(context, worker_group, "logprobs", names, self.obstacle is None)
        if critic is not None:
            self.values = Passes(context, critic, "values", ("values",), self.obstacle is None)

    @property
    def each(self) -> list[Passes]:
        return [one for one in (self.reference, self.logprobs, self.values) if one is not None]

    def let_learn(self, samples: list[Sample]) -> bool:
        """Whether what their gradients need of others than the learner is there."""
        return self.reference is None or all(sample.completion.key in self.reference.known for sample in samples)

    def begin(self, samples: int) -> None:
        for one in self.each:
            one.begin(samples)

    def heard(self, samples: list[Sample]) -> None:
        for one in self.each:
            one.heard(samples)

    @property
    def waiting(self) -> bool:
        """Whether there are samples to look at."""
        return any(one.waiting for one in self.each)

    def look(self, leases: list[Lease], seconds: float) -> list[Lease]:
        for one in self.each:
            leases = one.look(leases, seconds)
        return leases

    def pending(self) -> list[Any]:
        return [ref for one in self.each for ref in one.pending()]

    def done(self, wait: bool = False) -> list[Lease]:
        return [lease for one in self.each for lease in one.done(wait)]

    def metrics(self) -> dict[str, Any]:
        """Samples that were looked at ahead, and why none where none may be."""
        found: dict[str, Any] = {f"overlap/{one.what}": len(one.known) + len(one.asked) for one in self.each}
        return {**found, "overlap/passes_obstacle": self.obstacle or ""} if found else {}
