"""Score a step's samples in reward processes, under leases handed over by the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.warm_memory_budget import FIRST_MB
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.reward.scoring import Scoring, check_failures
from rlhfless_ray.reward.source import Source, item_factory
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Sample, SampleId, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START_S = 3.0  # start of a reward process: its imports, measured on two cores


class ScoreStage:
    def __init__(self, context: RunContext, pool: WorkerPool, source: Source, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """`source`: converts samples to workers' inputs."""
        self.context, self.pool = context, pool
        self.item, self.call_s = item_factory(source, tokenizer), source.call_s(context.recipe.reward.timeout_s)
        self.ahead: Scoring | None = None  # scoring of the step whose rollout is running

    # ---- ahead, while engines work ----------------------------------------------------------------------------

    def begin(self, samples: int) -> None:
        """Begin a step with `samples` samples, some of which may be scored before its score phase."""
        self.ahead = self._scoring(samples)

    def fits(self, leases: list[Lease]) -> bool:
        """Return whether these leases are enough for a worker, or one works already."""
        return bool(self.pool.working) or self.pool.enough(leases)

    @property
    def scored(self) -> Mapping[SampleId, Scored]:
        """The samples of the step that are scored so far."""
        return {} if self.ahead is None else self.ahead.scored

    def score_ahead(self, samples: Sequence[Sample], leases: list[Lease]) -> list[Lease]:
        """Score samples under one of the leases, and return the other leases."""
        assert self.ahead is not None
        left = self.pool.resize(max(1, len(self.pool.working)), leases)
        self.ahead.add(samples)
        return left

    def refs(self) -> list[Any]:
        return list(self.ahead.running) if self.ahead is not None else []

    def done_ahead(self) -> list[Lease]:
        """Collect available scores. Returns the leases once every request is answered, else []."""
        if self.ahead is None:
            return []
        self.ahead.collect(can_wait=False)  # engines may hold every other slot
        return self._park() if not self.ahead.running else []

    # ---- the phase --------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str = "score") -> Iterator[None]:
        context = self.context
        with context.phases.phase(name):
            reward = context.recipe.reward
            workers = reward.ranks if reward.model_path else reward.workers
            context.broker.resize(self.pool, min(workers, max(1, len(context.broker.free) // self.pool.width)))
            yield
            context.broker.put(self._park())

    def prepare(self, seconds: float, slot: Slot) -> None:
        """Start a process at `slot` now if none is warm and it is time to: the score phase begins in `seconds`."""
        if self.pool.parked or self.pool.working or self.pool.width > 1:  # the devices of a wide worker are not known yet
            return
        if self.context.autoscaler.steps.prewarm_now(seconds, START_S, self.context.ledger.parked_price(slot.node, FIRST_MB)):
            self.pool.prewarm(slot)

    def _park(self) -> list[Lease]:
        for instance in list(self.pool.working):
            self.context.record_start_or_replace(self.pool, instance, self.context.record_start)
        return self.pool.park_all()

    def _scoring(self, samples: int) -> Scoring:
        reward = self.context.recipe.reward
        release = self.context.broker.release  # slots that wait for the next phase; one of them may be the only one that is left
        return Scoring(self.pool, reward.timeout_s, reward.max_failed_share * samples, self.item, self.call_s, release)

    def score(self, samples: Sequence[Sample], step: int, name: str = "step") -> list[Scored]:
        """Return the samples with their rewards. Those that were not scored ahead are scored now.

        Raises RunError if too many have none, after the samples are written to disk.
        """
        record = self.context.record
        scoring, self.ahead = self.ahead or self._scoring(len(samples)), None
        try:
            ahead = {sample.id for sample in scoring.samples}
            scoring.add([sample for sample in samples if sample.id not in ahead])
            scoring.finish(record.progress.phase)
            scored = check_failures(scoring.newest(samples), scoring.failed, self.context.recipe.reward.max_failed_share)
        except RunError:
            record.samples(step, scoring.newest(samples), name)
            raise
        if scoring.failed:
            first, where = next(s for s in scored if s.error is not None), "update" if name == "step" else name
            record.progress.message(
                f"{scoring.failed} of {len(samples)} samples could not be scored and are left out of the {where}; row "
                f"{first.prompt.index}: {first.error}"
            )
        return scored
