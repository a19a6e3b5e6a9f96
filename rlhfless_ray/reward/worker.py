"""Scores samples one by one, each within its time, and names what went wrong with which."""

from __future__ import annotations

import math
import numbers
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from rlhfless_ray.reward.functions import RewardSource

MESSAGE_CHARACTERS = 300
RING_AGAIN_S = 0.1


class _TimeUp(BaseException):
    """Not an Exception, so that a reward function's `except Exception` does not swallow it."""


@dataclass(frozen=True)
class Score:
    """Exactly one of `reward` and `error` is set."""

    key: int
    reward: float | None
    error: str | None = None


class RewardWorker:
    """Holds a built reward function. Works in a process's main thread only: the time limit is a signal (SIGALRM)."""

    def __init__(self, source: RewardSource, timeout_s: float) -> None:
        self.source, self.timeout_s = source, timeout_s
        self.function = source.build()
        self._armed = False

    def score(self, items: list[tuple[int, str, str, dict[str, Any]]], budget_s: float = math.inf) -> list[Score]:
        """Scores of (key, prompt, response, row) items, in their order; of the first ones only when `budget_s` is over.

        A function that raises, takes longer than `timeout_s` or does not return a finite number gives a Score with an error.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("RewardWorker.score must run in the main thread: its time limit is a signal")
        handler_before = signal.signal(signal.SIGALRM, self._ring)
        end = time.monotonic() + budget_s
        scores: list[Score] = []
        try:
            for item in items:
                scores.append(self._score_one(*item))
                if time.monotonic() >= end:
                    break
            return scores
        finally:
            signal.signal(signal.SIGALRM, handler_before)

    def _score_one(self, key: int, prompt: str, response: str, row: dict[str, Any]) -> Score:
        late = Score(key, None, f"took longer than reward.timeout_s = {self.timeout_s:g} s")
        self._rang = False
        try:
            try:
                self._armed = True
                # It rings again and again, for functions whose bare `except:` swallows the first one.
                signal.setitimer(signal.ITIMER_REAL, self.timeout_s, RING_AGAIN_S)
                value = self.function(prompt, response, dict(row))
            finally:
                self._armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _TimeUp:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return late
        except (Exception, SystemExit) as error:
            return late if self._rang else Score(key, None, self._named(error))
        if self._rang:
            return late
        if not isinstance(value, (numbers.Real, bool)) and type(value).__name__ not in ("bool", "bool_"):
            return Score(key, None, f"`{self.source.name}` returned {type(value).__name__} {value!r:.100}, not a number")
        try:
            reward = float(value)
        except OverflowError:
            return Score(key, None, f"`{self.source.name}` returned a number too large for a float")
        if not math.isfinite(reward):
            return Score(key, None, f"`{self.source.name}` returned {reward}, not a finite number")
        return Score(key, reward)

    def _ring(self, *_: object) -> None:
        if self._armed:
            self._rang = True
            raise _TimeUp

    def _named(self, error: BaseException) -> str:
        line = self.source.line_of(error)
        where = f" ({self.source.file}, line {line})" if line is not None else ""
        return f"{type(error).__name__}: {' '.join(str(error).split())[:MESSAGE_CHARACTERS]}{where}"
