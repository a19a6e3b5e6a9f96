"""The driver's side of scoring: share samples out, stop when too much failed, replace a worker that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.faults import Cause
from rlhfless_ray.functions.instance import GONE, Instance
from rlhfless_ray.functions.memory import own_memory_mb
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.reward.source import Score, Source
from rlhfless_ray.types import Sample, Span
from rlhfless_ray.waits import STOP

ANSWER_S = 2.0  # a worker that has worked for this long answers with what it has
SLACK_S = 30.0  # beyond that and the time limit of one sample: what is on its way on a busy machine

Item = tuple[Any, ...]  # what the source's worker takes; first comes the position in the step's samples
MakeItem = Callable[[int, Sample], Item]


class RewardActor:
    """The scoring function's process."""

    def __init__(self, source: Source, timeout_s: float, device: str = "cpu") -> None:
        start = time.time()
        self.worker = source.worker(timeout_s, device)
        self.imported = Span("start", "load reward function", start, time.time())

    def open(self, threads: int) -> dict[str, Any]:
        self.worker.open(threads)
        return {"memory_mb": own_memory_mb(), "spans": [self.imported]}

    def park(self) -> dict[str, Any]:
        start = time.time()
        self.worker.park()
        return {"memory_mb": own_memory_mb(), "spans": [Span("transfer", "leave the device", start, time.time())]}

    def score(self, items: list[Item], budget_s: float) -> tuple[list[Score], list[Span]]:
        start = time.time()
        return self.worker.score(items, budget_s), [Span("work", "score", start, time.time())]


@dataclass
class _Call:
    """A worker at its share. `left`: not scored yet; `singly`: one sample a call, since one of them ends the process.
    `asked_s`: when it was, or as long as it starts, now."""

    worker: Instance
    left: list[Item]
    singly: bool
    start_by_s: float
    asked_s: float


class Scoring:
    """Scores samples on a pool's working instances, while whoever asked does something else or waits in `finish`.

    Each working instance gets an equal share and answers at least every few seconds with what it has. As soon as more than
    `max_failed` samples failed the rest is left alone: they have neither reward nor error. A worker that does not answer hangs
    where no signal reaches (in foreign code): it is killed and replaced, as one that died is, and the rest of its share is
    scored one by one, so that the sample at fault can be named: the one that ends a process that had nothing else. A node that
    is lost is no sample's fault. Raises RunError, naming it, when the pool's budget for faults is
    used up. `item` makes of a sample what the pool's workers take, who may take `call_s` beyond the time they were asked to answer
    in.
    """

    def __init__(
        self, pool: Pool, timeout_s: float, max_failed: float, item: MakeItem | None = None, call_s: float | None = None
    ) -> None:
        self.pool, self.timeout_s, self.max_failed = pool, timeout_s, max_failed
        self.item = item or _row
        self.call_s = timeout_s if call_s is None else call_s
        self.samples: list[Sample] = []
        self.running: dict[Any, _Call] = {}
        self.owed: list[tuple[list[Item], bool]] = []  # of lost workers, with nobody at work on it: what is left, and whether singly
        self.done = self.failed = 0

    @property
    def gave_up(self) -> bool:
        return self.failed > self.max_failed

    def add(self, samples: list[Sample]) -> None:
        first = len(self.samples)
        self.samples += samples
        items = [self.item(first + i, sample) for i, sample in enumerate(samples)]
        workers = list(self.pool.working)
        for k, worker in enumerate(workers):
            self._ask(worker, items[k :: len(workers)], singly=False)
        owed, self.owed = (self.owed, []) if workers else ([], self.owed)
        for k, (left, singly) in enumerate(owed):
            self._ask(workers[k % len(workers)], left, singly)

    def _ask(self, worker: Instance, left: list[Item], singly: bool) -> None:
        if left and not self.gave_up:
            ref = worker.actor.score.remote(left[:1] if singly else left, ANSWER_S)
            now = time.monotonic()
            self.running[ref] = _Call(worker, left, singly, now + self.pool.leases.deadline_s, now)

    def hear(self, wait_s: float = 0.0, *, waits: bool = True) -> bool:
        """Take the answers that are there, or come within `wait_s`; whether there were any. `waits`: for a lease, where a worker is
        lost with its own; else its share is scored with what is added next."""
        if not self.running:
            return False
        ready, _ = ray.wait(list(self.running), timeout=wait_s)
        late = [ref for ref, call in self.running.items() if ref not in ready and self._is_late(call)]
        for ref in [*ready, *late]:
            call = self.running.pop(ref)
            self._heard(call, _answer(self.pool, call.worker, ref) if ref in ready else None, waits)
        return bool(ready or late)

    def _is_late(self, call: _Call) -> bool:
        now = time.monotonic()
        if not call.worker.started and now < call.start_by_s:
            call.asked_s = now
        return now > call.asked_s + ANSWER_S + self.call_s + SLACK_S

    def _heard(self, call: _Call, scores: list[Score] | None, waits: bool) -> None:
        worker, singly = call.worker, call.singly
        if scores is None:
            cause = self.pool.cause(worker)
            at = self.samples[call.left[0][0]] if singly and not cause.is_preemption else None
            singly = singly or not cause.is_preemption
            if at is None and not waits and not self.pool.leases.living(worker.leases):
                self.pool.lose(worker, _why(self.timeout_s), cause)
                self.owed.append((call.left, singly))
                return
            worker = _replaced(self.pool, worker, at, self.timeout_s, cause)
            scores = [Score(call.left[0][0], None, _gone(self.timeout_s))] if at else []
        for score in scores:
            sample = self.samples[score.key]
            sample.reward, sample.error, sample.score = score.reward, score.error, score.score
            sample.extra_logs = dict(score.extra_logs)
        self.done += len(scores)
        self.failed += sum(score.error is not None for score in scores)
        done = {score.key for score in scores}
        self._ask(worker, [item for item in call.left if item[0] not in done], singly)

    def finish(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Wait until every sample has its reward or error, or too many have failed."""
        while self.running and not self.gave_up:
            STOP.check()
            if self.hear(0.1):
                say(f"score: {self.done} of {len(self.samples)} samples" + (f", {self.failed} failed" if self.failed else ""))


def _row(key: int, sample: Sample) -> Item:
    return key, sample.prompt.text, sample.text, sample.prompt.row


def maker(source: Source, tokenizer: Any) -> MakeItem:
    """`item` for `Scoring`."""

    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    def make(key: int, sample: Sample) -> Item:
        return source.item(key, sample, decode)

    return make


def _answer(pool: Pool, worker: Instance, ref: Any) -> list[Score] | None:
    """The scores, or None when the worker died."""
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


def _replaced(pool: Pool, worker: Instance, at: Sample | None, timeout_s: float, cause: Cause) -> Instance:
    """Of a sample that ends the run too, it is on disk then what became of it."""
    why = _why(timeout_s)
    if at is not None:
        at.error = _gone(timeout_s)
        why += f" at prompt row {at.prompt.index} {_short(at.prompt.text)}, response {_short(at.text)}"
    return pool.replace(worker, why, cause)


def _why(timeout_s: float) -> str:
    return f"it hung past reward.timeout_s = {timeout_s:g} s or died"


def _gone(timeout_s: float) -> str:
    return f"the reward process hung past {timeout_s:g} s or died, and was replaced"


def check_failures(samples: list[Sample], failed: int, max_failed_share: float) -> None:
    """Raise RunError, showing the first sample that could not be scored, when too many could not."""
    if failed <= max_failed_share * len(samples):
        return
    first = next(s for s in samples if s.error is not None)
    left = sum(s.reward is None and s.error is None for s in samples)
    raise RunError(
        f"{failed} of {len(samples)} samples could not be scored (reward.max_failed_share = {max_failed_share:g}"
        f"{f'; {left} were not tried any more' if left else ''}); the first: "
        f"{first.error}; prompt row {first.prompt.index} {_short(first.prompt.text)}, response {_short(first.text)}"
    )


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
