"""Waiting on Ray: every wait has a deadline, names what it waits for, and can be interrupted by a stop signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from rlhfless_ray.errors import RunError, Stopped

POLL_S = 0.1  # how soon a signal is noticed; ray.wait itself returns at once


class StopSignal:
    """SIGINT and SIGTERM set a flag that the waits look at; `deferred` lets a critical section end first."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_s = 0.0
        self.grace_s: float | None = None  # what SIGTERM leaves a critical section; None: outside of one
        self.say: Callable[[str], None] | None = None

    def check(self) -> None:
        if self.number is None:
            return
        if self.grace_s is not None:
            if self.number == signal.SIGINT:
                if self.say is not None:
                    self.say("the update ends first and is saved; Ctrl-C again gives it up")
                    self.say = None
                return
            if time.monotonic() - self.at_s < self.grace_s:
                return
        raise Stopped(self.number)

    def obeyed(self) -> int | None:
        """The signal, taken back: the waits of the saving that follows must not raise, unless another one comes."""
        number, self.number = self.number, None
        return number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for anything
        if number != self.number:
            self.number, self.at_s = number, time.monotonic()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Only the main thread may set handlers; elsewhere (a notebook's thread) signals stay as they are."""
        self.number = None
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        self.listen()
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    signal.signal(number, handler or signal.SIG_DFL)

    def listen(self) -> None:
        """Put our handlers in place (again: `ray.init` puts its own for SIGTERM there)."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._on_signal)

    @contextmanager
    def deferred(self, seconds: float, say: Callable[[str], None] | None = None) -> Iterator[None]:
        """Inside, SIGTERM is obeyed only `seconds` after it came, for whoever sends it kills soon. Ctrl-C is obeyed at the
        end: who presses it can wait, is told so by `say`, and can press it again."""
        self.grace_s, self.say = seconds, say
        try:
            yield
        finally:
            self.grace_s = self.say = None


STOP = StopSignal()  # one per process, as signals are


def wait_any(
    refs: list[Any], seconds: float, what: str, within_s: float = float("inf"), *, of_s: float | None = None
) -> list[Any]:
    """The references (or streaming generators) that are ready, at least one; after `within_s` maybe none. Raises RunError past the
    deadline, which is `of_s` where these `seconds` are what is left of it."""
    begin = time.monotonic()
    end = begin + seconds
    while True:
        STOP.check()
        ready, _ = ray.wait(refs, num_returns=1, timeout=min(POLL_S, max(0.0, end - time.monotonic())), fetch_local=False)
        if ready:
            return ready
        if time.monotonic() >= end:
            raise RunError(f"waited {seconds if of_s is None else of_s:.0f} s for {what} in vain")
        if time.monotonic() - begin >= within_s:
            return []


def get(ref: Any, seconds: float, what: str) -> Any:
    """The value of one reference or of a list of them. The first of them to fail raises at once: its companions may be
    waiting for it in a collective, and would until the deadline."""
    refs = ref if isinstance(ref, list) else [ref]
    values: dict[Any, Any] = {}
    end = time.monotonic() + seconds
    while left := [r for r in refs if r not in values]:
        for ready in wait_any(left, max(0.0, end - time.monotonic()), what, of_s=seconds):
            try:  # it is made, but may lie on a node that does not answer
                values[ready] = ray.get(ready, timeout=max(POLL_S, end - time.monotonic()))
            except GetTimeoutError:
                raise RunError(f"waited {seconds:.0f} s for {what} in vain") from None
    return [values[r] for r in refs] if isinstance(ref, list) else values[ref]
