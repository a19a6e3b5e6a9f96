"""Run forward passes over samples before the update: log-probabilities of learner and reference, values of the critic.

Results depend on the sample and the step's weights only. Finished samples can therefore be computed while engines still generate
others, on slots that engines have released. The learn phase computes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from placement import calls
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.advantage import spans
from rlhfless_ray.learn.batch import Batch, batch_of
from rlhfless_ray.learn.overlap_rules import passes, passes_obstacle
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Sample, SampleId

WORTH = 4  # a pass pays for a quarter of a step's samples, even with few tokens


def fill_budget(sizes: Iterable[int], budget: int) -> tuple[int, int, bool]:
    """Return how many of these fit a budget of tokens, at least the first one, their tokens, and whether the next one did not fit."""
    count = tokens = 0
    for size in sizes:
        if count and tokens + size > budget:
            return count, tokens, True
        count, tokens = count + 1, tokens + size
    return count, tokens, False


class Passes:
    """One kind of forward pass. In every step, call `begin`, then `add_samples`, `start_ahead` and `collect` repeatedly, then `of`."""

    def __init__(self, context: RunContext, worker_group: WorkerGroup, call: str, what: str, names: tuple[str, ...], ahead: bool) -> None:
        """Configure a pass.

        Args:
            call: its name in the graph of the step (`placement.calls`).
            what: the method to call: `logprobs` (with `names` of results, see `overlap_rules.passes`), `reference` or `values`.
            ahead: whether samples are computed before the learn phase.
        """
        self.context, self.worker_group, self.call, self.what, self.names, self.ahead = context, worker_group, call, what, names, ahead
        self.arguments = (names,) if what == "logprobs" else ()
        self.per_token_s: float | None = None  # seconds per token of the newest pass, under the leases that its ranks held
        self.begin(0)

    def begin(self, samples: int) -> None:
        """Begin a step with this number of samples."""
        self.samples = samples
        self.waiting: list[Sample] = []
        self.in_pass: list[Sample] = []  # samples of the pass behind `refs`
        self.refs: list[Any] = []
        self.known: dict[SampleId, dict[str, np.ndarray]] = {}  # sample → name → values of its tokens

    # ---- ahead, while engines work ----------------------------------------------------------------------------

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Queue finished samples."""
        if self.ahead:
            self.waiting += samples

    def start_ahead(self, leases: list[Lease], seconds: float) -> list[Lease]:
        """Start a pass over queued samples if it would take at most `seconds`. Returns the leases that it does not use."""
        if self.refs or not self.waiting or not self.worker_group.fits(leases):
            return leases
        count, tokens = self._choose_samples(seconds)
        if not count:
            return leases
        self.in_pass, self.waiting = self.waiting[:count], self.waiting[count:]
        left = leases
        if not self.worker_group.working:
            self.worker_group.slots = self.worker_group.ranks
            left = self.worker_group.assign_leases(leases)
        self.tokens = tokens
        self.refs = self.worker_group.ask(self.what, self._batch(self.in_pass), *self.arguments)
        return left

    def has_work(self, seconds: float) -> bool:
        """Return whether a pass over queued samples would be started, if its worker group had leases."""
        return not self.refs and bool(self.waiting) and self._choose_samples(seconds)[0] > 0

    def _choose_samples(self, seconds: float) -> tuple[int, int]:
        """Return the number of samples for a pass and their tokens: about a micro-batch per share, or (0, 0) if no pass pays or fits."""
        budget = self.context.recipe.learner.max_micro_batch_tokens * self.worker_group.cutter.ranks
        count, tokens, full = fill_budget((sample.total_tokens for sample in self.waiting), budget)
        worth = full or 2 * tokens >= budget or WORTH * count >= self.samples
        return (count, tokens) if worth and self._takes_s(tokens) <= seconds else (0, 0)

    def _takes_s(self, tokens: int) -> float:
        """Predict the seconds of a pass: from the newest one, or before the first one as those of a whole update."""
        if self.per_token_s is not None:
            return self.per_token_s * tokens
        held = min((len(instance.leases) for instance in self.worker_group.by_rank), default=0)
        return self.context.autoscaler.learner.predict(held or 1, tokens)  # `start_ahead` gives a parked rank one lease

    def pending(self) -> list[Any]:
        return self.worker_group.pending(self.refs)

    def collect(self, wait: bool = False, parks: bool = True) -> list[Lease]:
        """Collect a finished pass, and return its leases.

        On GPU the worker group keeps them, because it needs its devices soon. `parks=False`: also on CPU.
        """
        if not self.refs or (self.pending() and not wait):
            return []
        refs, self.refs = self.refs, []
        if (answer := self.worker_group.wait_for_values(refs, self.what)) is not None:
            results, took_s = answer
            self.per_token_s = took_s / max(1, self.tokens)
            for sample, span in zip(self.in_pass, spans([sample.written_tokens for sample in self.in_pass]), strict=True):
                self.known[sample.id] = {name: results[name][span] for name in self.names}
        self.in_pass = []
        return self.worker_group.park() if parks and self.context.leases.resource == "cpu" else []

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        return batch_of(samples, self.context.recipe.rollout.samples_per_prompt)

    # ---- the learn phase --------------------------------------------------------------------------------------

    def lacks(self, samples: Sequence[Sample]) -> bool:
        """Return whether results of some of these samples are missing."""
        return any(sample.id not in self.known for sample in samples)

    def start(self, samples: Sequence[Sample], batch: Batch) -> Pending[dict[str, np.ndarray]]:
        """Start to compute what is missing for `batch`, which consists of these samples. The worker group has leases if it `lacks` any.

        The result: values by name, per response token.
        """
        keys = [sample.id for sample in samples]
        later = np.array([i for i, key in enumerate(keys) if key not in self.known], np.int64)
        by_key = {key: self.known[key] for key in keys if key in self.known}
        empty = np.zeros(0, np.float32)

        def joined() -> dict[str, np.ndarray]:
            return {name: np.concatenate([empty, *(by_key[key][name] for key in keys)]) for name in self.names}

        if not len(later):
            return Pending(joined)
        part = batch if len(later) == len(batch) else batch.take(later)
        begun = self.worker_group.start_compute(self.what, part, *self.arguments)

        def result() -> dict[str, np.ndarray]:
            results = begun.result()
            for i, span in zip(later, spans(part.response_lengths), strict=True):
                by_key[keys[i]] = {name: results[name][span] for name in self.names}
            return joined()

        return Pending(result, begun.is_ready, begun.has_failed, begun.refs)


class StepPasses:
    """The passes of reference, learner and critic that the recipe needs."""

    def __init__(self, context: RunContext, worker_group: WorkerGroup, critic: WorkerGroup | None, reference: WorkerGroup | None) -> None:
        recipe = context.recipe
        self.obstacle = passes_obstacle(recipe)
        beside_updates = recipe.rollout.rolls_out_ahead  # engines and learner hold all slots then, so no other worker group gets one
        others_ahead = self.obstacle is None and not beside_updates
        self.reference: Passes | None = None
        self.logprobs: Passes | None = None
        self.values: Passes | None = None
        if reference is not None:
            self.reference = Passes(context, reference, calls.REFERENCE, "reference", ("reference",), others_ahead)
        samples = recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt
        names = passes(recipe.algorithm, recipe.lora, samples, apart=recipe.has_reference)
        if names:
            self.logprobs = Passes(context, worker_group, calls.OLD, "logprobs", names, self.obstacle is None)
        if critic is not None:
            self.values = Passes(context, critic, calls.VALUES, "values", ("values",), others_ahead)

    @property
    def each(self) -> list[Passes]:
        return [kind for kind in (self.reference, self.logprobs, self.values) if kind is not None]

    def begin(self, samples: int) -> None:
        for kind in self.each:
            kind.begin(samples)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        for kind in self.each:
            kind.add_samples(samples)

    @property
    def waiting(self) -> bool:
        """Whether samples are queued."""
        return any(kind.waiting for kind in self.each)

    def with_work(self, seconds: float) -> list[WorkerGroup]:
        """Return the worker groups of the passes that would be started, if these had leases."""
        return [kind.worker_group for kind in self.each if kind.has_work(seconds)]

    def start_ahead(self, leases: list[Lease], seconds: float) -> list[Lease]:
        for kind in self.each:
            leases = kind.start_ahead(leases, seconds)
        return leases

    def pending(self) -> list[Any]:
        return [ref for kind in self.each for ref in kind.pending()]

    def collect(self, wait: bool = False) -> list[Lease]:
        return [lease for kind in self.each for lease in kind.collect(wait)]

    def metrics(self) -> dict[str, Any]:
        """Return the number of samples computed ahead, and the reason if none may be."""
        counts: dict[str, Any] = {f"overlap/{kind.what}": len(kind.known) + len(kind.in_pass) for kind in self.each}
        return {**counts, "overlap/passes_obstacle": self.obstacle or ""} if counts else {}
