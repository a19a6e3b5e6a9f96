"""Time limits for arbitrary code, by a repeated signal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REPEAT_S = 0.1


class TimeLimitExceeded(Exception):
    """The call did not return in time."""


class _LimitSignal(BaseException):
    """Raised by the signal handler. Not an Exception, so that a reward function's `except Exception` does not catch it."""


class TimeLimit:
    """A time limit by SIGALRM, which works in a process's main thread only."""

    def __init__(self) -> None:
        self._armed = self._rang = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGALRM inside the block, in which calls are made. The former handler is restored."""
        before = signal.signal(signal.SIGALRM, self._ring)
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, before)

    def call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function and return its value. Raises TimeLimitExceeded, also if the function caught the signal."""
        self._rang = False
        # Some functions use the same signal for their own limits and leave their handler installed.
        signal.signal(signal.SIGALRM, self._ring)
        try:
            try:
                self._armed = True
                # Repeat the signal, for functions whose bare `except:` catches the first one.
                signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
                value = function(*arguments)
            finally:
                self._armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _LimitSignal:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise TimeLimitExceeded from None
        except (Exception, SystemExit):
            if self._rang:
                raise TimeLimitExceeded from None
            raise
        if self._rang:
            raise TimeLimitExceeded
        return value

    def _ring(self, *_: object) -> None:
        if self._armed:
            self._rang = True
            raise _LimitSignal
