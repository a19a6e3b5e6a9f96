"""Time limits for arbitrary code, kept by a thread that watches the clock."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REPEAT_S = 0.1
# Code that limits its own time uses SIGALRM. This signal is free on Linux, and it interrupts a call such as time.sleep, too.
LIMIT_SIGNAL = signal.SIGRTMAX - 5


class TimeLimitExceeded(Exception):
    """The call did not return in time."""


class _LimitSignal(BaseException):
    """Raised by the signal handler. Not an Exception, so that a reward function's `except Exception` does not catch it."""


class TimeLimit:
    """A time limit for calls in a process's main thread.

    A thread interrupts the main thread at the limit. A call that ignores this fails too as soon as it returns. One that never returns,
    or holds the interpreter's lock, is left to the supervisor of the process, which ends it.
    """

    def __init__(self) -> None:
        self._armed = self._rang = False
        self._deadline_s = math.inf

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Watch the calls that are made inside the block. The handler of SIGALRM, which they may change, is restored."""
        before = signal.getsignal(signal.SIGALRM)
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(threading.get_ident(), ended), name="reward time limit", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            signal.signal(signal.SIGALRM, before)

    def call(self, seconds: float, function: Callable[..., Any], *arguments: object) -> Any:
        """Call the function and return its value. Raises TimeLimitExceeded, also if the function caught the interruption."""
        self._rang = False
        signal.signal(LIMIT_SIGNAL, self._ring)  # it stays: a late signal would end a process without a handler
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {LIMIT_SIGNAL})
        end_s = time.monotonic() + seconds
        try:
            try:
                self._deadline_s, self._armed = end_s, True
                value = function(*arguments)
            finally:
                self._armed, self._deadline_s = False, math.inf
                signal.setitimer(signal.ITIMER_REAL, 0)  # a limit of the function's own must not ring later
        except _LimitSignal:
            raise TimeLimitExceeded from None
        except (Exception, SystemExit):
            if self._rang or time.monotonic() > end_s:
                raise TimeLimitExceeded from None
            raise
        if self._rang or time.monotonic() > end_s:
            raise TimeLimitExceeded
        return value

    def _watch(self, thread: int, ended: threading.Event) -> None:
        while not ended.wait(min(REPEAT_S, max(0.001, self._deadline_s - time.monotonic()))):
            if time.monotonic() >= self._deadline_s:  # again and again, for functions whose bare `except:` catches the first one
                signal.pthread_kill(thread, LIMIT_SIGNAL)
                if ended.wait(REPEAT_S):
                    return

    def _ring(self, *_: object) -> None:
        if self._armed and time.monotonic() >= self._deadline_s:  # not a late signal for the call before
            self._rang = True
            raise _LimitSignal
