"""A tenant's requests: each is done once, those of a model in the order of their numbers, and their results are kept for a while."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlhfless_ray.service.wire import ClientMistake

MAX_OPEN = 4096  # requests of a tenant that are not done
KEPT_RESULTS = 4096


class QueueFull(Exception):
    """The tenant has too many open requests."""


@dataclass(eq=False)
class Job:
    """A request. `run` returns the reply: JSON or protobuf. Jobs with the same `batch` are given to `run` of the first one together."""

    id: str
    run: Callable[[list[Job]], Any]
    content: Any = None
    batch: str = ""
    future: Future[Any] = field(default_factory=Future)


class Requests:
    """Called by the server's thread, which submits and reads, and by the tenant's, which takes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ready: deque[Job] = deque()
        self.early: dict[str, dict[int, Job]] = {}  # model → number → job whose predecessors have not arrived
        self.expected: dict[str, int] = {}  # model → number of its next request
        self.known: OrderedDict[str, Job] = OrderedDict()
        self.closed = False

    def submit(self, job: Job, model: str = "", number: int | None = None) -> Job:
        """Accept a job, or return the one that was accepted under its id. `number`: its place among the requests of the model.

        Raises QueueFull, and ClientMistake for a number that the model has passed.
        """
        with self.changed:
            if job.id in self.known:
                return self.known[job.id]
            if sum(not one.future.done() for one in self.known.values()) >= MAX_OPEN:
                raise QueueFull
            if number is not None and number < self.expected.setdefault(model, 1):
                raise ClientMistake(f"seq_id: {number} of {model} is done, and its result is not kept any more")
            self.known[job.id] = job
            if number is None:
                self.ready.append(job)
            else:
                self.early.setdefault(model, {})[number] = job
                while (following := self.early[model].pop(self.expected[model], None)) is not None:
                    self.ready.append(following)
                    self.expected[model] += 1
            for id in [id for id, one in self.known.items() if one.future.done()][: max(0, len(self.known) - KEPT_RESULTS)]:
                del self.known[id]
            self.changed.notify_all()
            return job

    def take(self, within_s: float) -> list[Job]:
        """Return the next job with all that are ready of its batch, or nothing if none arrives in time."""
        with self.changed:
            self.changed.wait_for(lambda: self.ready or self.closed, within_s)
            if not self.ready:
                return []
            first = self.ready.popleft()
            jobs = [first, *(one for one in self.ready if first.batch and one.batch == first.batch)]
            self.ready = deque(one for one in self.ready if one not in jobs)
            return jobs

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
