"""Wait on Ray with a deadline, a name for what is awaited, and interruption by stop signals."""

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

from rlhfless_ray.common.errors import RunError, Stopped

POLL_S = 0.1  # interval of checks for a signal; ray.wait itself returns as soon as a reference is ready


class StopSignal:
    """Record SIGINT and SIGTERM in a flag that every wait checks. `deferred` lets a critical section finish first."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_s = 0.0
        self.grace_s: float | None = None  # time that a critical section has after SIGTERM; None outside of one
        self.say: Callable[[str], None] | None = None

    def check(self) -> None:
        if self.number is None:
            return
        if self.grace_s is not None:
            if self.number == signal.SIGINT:
                if self.say is not None:
                    self.say("stopping once this update is finished and saved; press Ctrl-C again to stop now")
                    self.say = None
                return
            if time.monotonic() - self.at_s < self.grace_s:
                return
        raise Stopped(self.number)

    def acknowledge(self) -> int | None:
        """Return and clear the signal, so that the waits of the final save do not raise. A new signal still stops them."""
        number, self.number = self.number, None
        return number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C ends the run at once
        if number != self.number:
            self.number, self.at_s = number, time.monotonic()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Install the signal handlers inside the block. Does nothing outside the main thread, such as in a notebook's thread."""
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
        """Install the signal handlers. Call it again after `ray.init`, which installs its own for SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._on_signal)

    @contextmanager
    def deferred(self, seconds: float, say: Callable[[str], None] | None = None) -> Iterator[None]:
        """Delay stopping until the block ends.

        SIGTERM still stops it `seconds` after it arrived, because SIGKILL usually follows. Ctrl-C waits for the end of the
        block, which `say` announces; a second Ctrl-C stops at once.
        """
        self.grace_s, self.say = seconds, say
        try:
            yield
        finally:
            self.grace_s = self.say = None


STOP = StopSignal()  # one per process, because signal handlers are


def wait_any(refs: list[Any], seconds: float, what: str, within_s: float = float("inf"), *, of_s: float | None = None) -> list[Any]:
    """Return the references (or streaming generators) that are ready, at least one, or [] after `within_s`.

    Raises RunError after `seconds`. Its message names `of_s` if `seconds` is only the remainder of that deadline.
    """
    begin = time.monotonic()
    end = begin + seconds
    while True:
        STOP.check()
        ready, _ = ray.wait(refs, num_returns=1, timeout=min(POLL_S, max(0.0, end - time.monotonic())), fetch_local=False)
        if ready:  # with a number of 1, small values that are here would always come before what arrives on other nodes
            return ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0] if len(refs) > 1 else ready
        if time.monotonic() >= end:
            raise _timed_out(seconds if of_s is None else of_s, what)
        if time.monotonic() - begin >= within_s:
            return []


def get(ref: object, seconds: float, what: str) -> Any:
    """Return the value of one reference or of a list of them. Raises RunError after `seconds`.

    The first reference to fail raises at once: the others may wait for it in a collective until the deadline.
    """
    refs = ref if isinstance(ref, list) else [ref]
    values: dict[Any, Any] = {}
    end = time.monotonic() + seconds
    while left := [r for r in refs if r not in values]:
        for ready in wait_any(left, max(0.0, end - time.monotonic()), what, of_s=seconds):
            # the value exists, but may be on a node that does not respond
            values[ready] = fetch(ready, max(POLL_S, end - time.monotonic()), what, of_s=seconds)
    return [values[r] for r in refs] if isinstance(ref, list) else values[ref]


def fetch(ref: Any, seconds: float, what: str, *, of_s: float | None = None) -> Any:
    """Return the value of a reference like `get`, without looking for stop signals: in ranks, and where a stop is handled later.

    `of_s`: as in `wait_any`.
    """
    try:
        return ray.get(ref, timeout=seconds)
    except GetTimeoutError:
        raise _timed_out(seconds if of_s is None else of_s, what) from None


def _timed_out(seconds: float, what: str) -> RunError:
    return RunError(f"timed out after {seconds:.0f} s waiting for {what}")
