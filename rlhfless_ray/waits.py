"""Waiting on Ray: every wait has a deadline, names what it waits for, and can be interrupted by a stop signal."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray

from rlhfless_ray.errors import RunError, Stopped

POLL_S = 0.1  # how soon a signal is noticed; ray.wait itself returns at once


class StopSignal:
    """SIGINT and SIGTERM set a flag that the waits look at; `grace` lets a short critical section end first."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_s = 0.0
        self.grace_s = 0.0

    def check(self) -> None:
        if self.number is not None and time.monotonic() - self.at_s >= self.grace_s:
            raise Stopped(self.number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for anything
        self.number, self.at_s = number, time.monotonic()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Only the main thread may set handlers; elsewhere (a notebook's thread) signals stay as they are."""
        self.number = None
        try:
            before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self, seconds: float) -> Iterator[None]:
        """Inside, a signal is obeyed only `seconds` after it came: time for a learner update to end."""
        self.grace_s = seconds
        try:
            yield
        finally:
            self.grace_s = 0.0


STOP = StopSignal()  # one per process, as signals are


def wait_any(refs: list[Any], seconds: float, what: str) -> list[Any]:
    """The references (or streaming generators) that are ready, at least one. Raises RunError past the deadline."""
    end = time.monotonic() + seconds
    while True:
        STOP.check()
        ready, _ = ray.wait(refs, num_returns=1, timeout=min(POLL_S, max(0.0, end - time.monotonic())), fetch_local=False)
        if ready:
            return ready
        if time.monotonic() >= end:
            raise RunError(f"waited {seconds:.0f} s for {what} in vain")


def get(ref: Any, seconds: float, what: str) -> Any:
    """The value of one reference or of a list of them. The first of them to fail raises at once: its companions may be
    waiting for it in a collective, and would until the deadline."""
    refs = ref if isinstance(ref, list) else [ref]
    values: dict[Any, Any] = {}
    end = time.monotonic() + seconds
    while left := [r for r in refs if r not in values]:
        for ready in wait_any(left, max(0.0, end - time.monotonic()), what):
            values[ready] = ray.get(ready)
    return [values[r] for r in refs] if isinstance(ref, list) else values[ref]
