"""Scores samples one by one, each within its time, and names what went wrong with which."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhfless_ray.errors import one_line
from rlhfless_ray.reward.functions import Worker
from rlhfless_ray.reward.limit import TimeLimit, TookTooLong

if TYPE_CHECKING:
    from rlhfless_ray.reward.functions import RewardSource
    from rlhfless_ray.reward.user_file import UserFile

MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class Score:
    """Exactly one of `reward` and `error` is set."""

    key: int
    reward: float | None
    error: str | None = None
    score: float | None = None  # for dynamic filtering, where it is told apart from the reward
    extra_logs: Mapping[str, float] = field(default_factory=dict)


class RewardWorker(Worker):
    """Holds a built reward function `(prompt, response, row) -> float`. Works in a process's main thread only."""

    def __init__(self, source: RewardSource, timeout_s: float) -> None:
        self.source, self.timeout_s = source, timeout_s
        self.function = source.build()
        self.limit = TimeLimit()

    def score(self, items: list[tuple[int, str, str, dict[str, Any]]], budget_s: float = math.inf) -> list[Score]:
        """Scores of (key, prompt, response, row) items, in their order; of the first ones only when `budget_s` is over.

        A function that raises, takes longer than `timeout_s` or does not return a finite number gives a Score with an error.
        """
        end = time.monotonic() + budget_s
        scores: list[Score] = []
        with self.limit.listening():
            for item in items:
                scores.append(self._score_one(*item))
                if time.monotonic() >= end:
                    break
        return scores

    def _score_one(self, key: int, prompt: str, response: str, row: dict[str, Any]) -> Score:
        try:
            value = self.limit.call(self.timeout_s, self.function, prompt, response, dict(row))
        except TookTooLong:
            return Score(key, None, late(self.timeout_s))
        except (Exception, SystemExit) as error:
            return Score(key, None, named(error, self.source.user_file))
        try:
            return Score(key, finite(value))
        except ValueError as error:
            return Score(key, None, f"`{self.source.name}` returned {error}")


def finite(value: object) -> float:
    """Any kind of real number as a float. Raises ValueError that says what it is instead, to follow "… returned "."""
    number = real(value)
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    return number


def real(value: object) -> float:
    """As `finite`, but NaN and infinities are numbers too."""
    if not isinstance(value, (numbers.Real, bool)) and type(value).__name__ not in ("bool", "bool_"):
        raise ValueError(f"{type(value).__name__} {value!r:.100}, not a number")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError("a number too large for a float") from None


def late(timeout_s: float) -> str:
    return f"took longer than reward.timeout_s = {timeout_s:g} s"


def named(error: BaseException, file: UserFile | None) -> str:
    """What was raised, and where in the user's file."""
    line = file.line_of(error) if file is not None else None
    where = f" ({file.path}, line {line})" if file is not None and line is not None else ""
    return f"{type(error).__name__}: {one_line(error, MESSAGE_CHARACTERS)}{where}"
