"""A time limit for code that knows nothing of it: a signal that rings until it is heard."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

RING_AGAIN_S = 0.1


class TookTooLong(Exception):
    """The call did not return in time."""


class _TimeUp(BaseException):
    """Not an Exception, so that a reward function's `except Exception` does not swallow it."""


class TimeLimit:
    """Works in a process's main thread only: the limit is a signal (SIGALRM)."""

    def __init__(self) -> None:
        self._armed = self._rang = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Calls are made inside; afterwards SIGALRM is as it was before."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("RewardWorker.score must run in the main thread: its time limit is a signal")
        before = signal.signal(signal.SIGALRM, self._ring)
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, before)

    def call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value. Raises TookTooLong, also when the function swallowed the signal, and what the function raises."""
        self._rang = False
        # Some functions limit their own parts by the same signal and leave their handler in place.
        signal.signal(signal.SIGALRM, self._ring)
        try:
            try:
                self._armed = True
                # It rings again and again, for functions whose bare `except:` swallows the first one.
                signal.setitimer(signal.ITIMER_REAL, seconds, RING_AGAIN_S)
                value = function(*arguments)
            finally:
                self._armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _TimeUp:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise TookTooLong from None
        except (Exception, SystemExit):
            if self._rang:
                raise TookTooLong from None
            raise
        if self._rang:
            raise TookTooLong
        return value

    def _ring(self, *_: object) -> None:
        if self._armed:
            self._rang = True
            raise _TimeUp
