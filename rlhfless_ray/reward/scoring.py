"""The driver's side of scoring: distribute samples, give up after too many failures, and replace workers that hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.instance import GONE, Instance
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.reward.source import Item, MakeItem, Score
from rlhfless_ray.types import Sample, SampleId, Scored

REPLY_AFTER_S = 2.0  # a worker replies with what it has after this long
SLACK_S = 30.0  # added to REPLY_AFTER_S and one sample's time limit, for delays on a busy machine


@dataclass
class _Call:
    """A worker's current request. `remaining`: its samples without a score.

    `one_by_one`: one sample per request, because one of them ended the process. `sent_s`: time of the request, or the current
    time while the worker is still starting.
    """

    worker: Instance
    remaining: list[Item]
    one_by_one: bool
    start_by_s: float
    sent_s: float


class Scoring:
    """Score samples on a pool's working instances while the driver does something else or waits in `finish`.

    Each working instance gets an equal share and replies every few seconds with what it has. After more than `max_failed`
    failures the remaining samples are dropped and stay unscored. A worker that does not reply hangs in code that no signal
    reaches. It is killed and replaced like one that died. The rest of its share is scored one by one, so that the sample at
    fault can be named, unless its node was lost. Raises RunError when the pool's failure budget is used up.

    Args:
        item: converts a sample to the input of the pool's workers.
        call_s: time in seconds that a worker may need beyond REPLY_AFTER_S.
        make_room: as in `WorkerPool.replace`.
    """

    def __init__(
        self,
        pool: WorkerPool,
        timeout_s: float,
        max_failed: float,
        item: MakeItem,
        call_s: float,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        self.pool, self.timeout_s, self.max_failed, self.item = pool, timeout_s, max_failed, item
        self.call_s, self.make_room = call_s, make_room
        self.samples: list[Sample] = []
        self.scored: dict[SampleId, Scored] = {}  # those that have a reward or an error
        self.running: dict[Any, _Call] = {}
        self.unassigned: list[tuple[list[Item], bool]] = []  # (remaining, one_by_one) of lost workers
        self.failed = 0

    @property
    def has_given_up(self) -> bool:
        return self.failed > self.max_failed

    def add(self, samples: Sequence[Sample]) -> None:
        """Add samples. Those that have come with their reward or error are only counted."""
        first = len(self.samples)
        self.samples += samples
        self._record(sample for sample in samples if isinstance(sample, Scored))
        items = [self.item(first + i, sample) for i, sample in enumerate(samples) if not isinstance(sample, Scored)]
        workers = list(self.pool.working)
        for k, worker in enumerate(workers):
            self._send(worker, items[k :: len(workers)], one_by_one=False)
        unassigned, self.unassigned = (self.unassigned, []) if workers else ([], self.unassigned)
        for k, (remaining, one_by_one) in enumerate(unassigned):
            self._send(workers[k % len(workers)], remaining, one_by_one)

    def _send(self, worker: Instance, remaining: list[Item], one_by_one: bool) -> None:
        if remaining and not self.has_given_up:
            ref = worker.actor.score.remote(remaining[:1] if one_by_one else remaining, REPLY_AFTER_S)
            now = time.monotonic()
            self.running[ref] = _Call(worker, remaining, one_by_one, now + self.pool.leases.deadline_s, now)

    def collect(self, wait_s: float = 0.0, *, can_wait: bool = True) -> bool:
        """Collect replies that are available or come within `wait_s`, and return whether there were any.

        `can_wait`: whether a worker that was lost with its lease may wait for a new one. If not, its samples are sent with the
        next `add`.
        """
        if not self.running:
            return False
        ready, _ = ray.wait(list(self.running), timeout=wait_s)
        over = [ref for ref, call in self.running.items() if ref in ready or self._is_late(call)]
        for ref in over:
            if (call := self.running.get(ref)) is None:  # of a worker that was lost, and taken over with its other calls
                continue
            scores = _fetch_scores(self.pool, call.worker, ref) if ref in ready else None
            if scores is None:
                self._handle_loss(call.worker, can_wait)
            else:
                del self.running[ref]
                self._record(_scored(self.samples[score.key], score) for score in scores)
                self._send(call.worker, _without(call.remaining, scores), call.one_by_one)
        return bool(over)

    def _is_late(self, call: _Call) -> bool:
        now = time.monotonic()
        if not call.worker.started and now < call.start_by_s:
            call.sent_s = now
        return now > call.sent_s + REPLY_AFTER_S + self.call_s + SLACK_S

    def _handle_loss(self, worker: Instance, can_wait: bool) -> None:
        """Send what a lost worker owes to its successor. It worked on the oldest of its calls."""
        calls = [self.running.pop(ref) for ref, call in list(self.running.items()) if call.worker is worker]
        first, cause = calls[0], self.pool.cause(worker)
        suspect = first.remaining[0][0] if first.one_by_one and not cause.is_preemption else None
        first.one_by_one = first.one_by_one or not cause.is_preemption
        if suspect is None and not can_wait and not self.pool.leases.without_lost(worker.leases):
            self.pool.end_lost(worker, _loss_reason(self.timeout_s), cause)
            self.unassigned += [(call.remaining, call.one_by_one) for call in calls]
            return
        why = _loss_reason(self.timeout_s)
        if suspect is not None:  # it gets its error first, because a failure that ends the run writes it to disk
            sample, error = self.samples[suspect], f"the reward process hung past {self.timeout_s:g} s or died, and was replaced"
            failure = Score(suspect, None, error)
            self._record([_scored(sample, failure)])
            first.remaining = _without(first.remaining, [failure])
            why += f" at prompt row {sample.prompt.index} {_short(sample.prompt.text)}, response {_short(sample.text)}"
        successor = self.pool.replace(worker, why, cause, self.make_room)
        for call in calls:
            self._send(successor, call.remaining, call.one_by_one)

    def _record(self, scored: Iterable[Scored]) -> None:
        for sample in scored:
            self.scored[sample.id] = sample
            self.failed += sample.error is not None

    def newest(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples, those that have a reward or an error with it."""
        return [self.scored.get(sample.id, sample) for sample in samples]

    def finish(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Wait until every sample has its reward or error, or too many have failed. `say`: callback for progress messages."""
        while self.running and not self.has_given_up:
            STOP.check()
            if self.collect(0.1):
                say(f"score: {len(self.scored)} of {len(self.samples)} samples" + (f", {self.failed} failed" if self.failed else ""))


def _scored(sample: Sample, score: Score) -> Scored:
    return Scored(**vars(sample), reward=score.reward, error=score.error, score=score.score, extra_logs=score.extra_logs)


def _without(items: list[Item], scores: list[Score]) -> list[Item]:
    """Return the items that have no score yet."""
    done = {score.key for score in scores}
    return [item for item in items if item[0] not in done]


def _fetch_scores(pool: WorkerPool, worker: Instance, ref: Any) -> list[Score] | None:
    """Return the scores, or None if the worker died."""
    try:
        scores, spans = ray.get(ref)
    except GONE:
        return None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RunError):
            raise RunError(str(error.cause)) from error
        raise RunError(f"the reward worker failed: {error.cause or error}") from error
    pool.ledger.spans([lease.id for lease in worker.leases], spans)
    return scores


def _loss_reason(timeout_s: float) -> str:
    return f"it hung past reward.timeout_s = {timeout_s:g} s or died"


def check_failures(samples: Sequence[Sample], failed: int, max_failed_share: float) -> list[Scored]:
    """Return the samples if all are scored.

    Raises RunError, showing the first sample without a reward, if more than `max_failed_share` could not be scored.
    """
    scored = [sample for sample in samples if isinstance(sample, Scored)]
    if failed <= max_failed_share * len(samples):
        assert len(scored) == len(samples)
        return scored
    first, remaining = next(s for s in scored if s.error is not None), len(samples) - len(scored)
    raise RunError(
        f"{failed} of {len(samples)} samples could not be scored (reward.max_failed_share = {max_failed_share:g}"
        f"{f'; {remaining} were not tried' if remaining else ''}); the first: "
        f"{first.error}; prompt row {first.prompt.index} {_short(first.prompt.text)}, response {_short(first.text)}"
    )


def _short(text: str, max_chars: int = 80) -> str:
    return repr(text if len(text) <= max_chars else text[: max_chars - 1] + "…")
