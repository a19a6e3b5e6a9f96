"""A reward function as a value: shipped as plain data, built where it runs, called within its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhfless_ray.reward.limit import TimeLimit, TookTooLong
from rlhfless_ray.reward.source import Decode, Score, Source, Worker
from rlhfless_ray.reward.user_file import UserFile
from rlhfless_ray.reward.values import finite, late, named

if TYPE_CHECKING:
    from rlhfless_ray.types import Sample

RewardFunction = Callable[[str, str, dict[str, Any]], float]


@dataclass(frozen=True)
class RewardSource(Source):
    """A function `(prompt, response, row) -> float`: a task's verifier, `math`, or one of a user's file."""

    kind: str  # "task", "math" or "file"
    name: str  # the task's name, or the function's
    answer_column: str = ""  # for "math"
    file: str = ""  # as the user wrote it: for messages only, it is never opened again
    text: str = ""  # the file's source

    @property
    def user_file(self) -> UserFile | None:
        return UserFile(self.file, self.text) if self.kind == "file" else None

    def item(self, key: int, sample: Sample, decode: Decode) -> tuple[int, str, str, dict[str, Any]]:
        return key, sample.prompt.text, sample.text, sample.prompt.row

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        return RewardWorker(self, timeout_s)

    def build(self) -> RewardFunction:
        """The function. For a file this runs its top-level code."""
        if self.kind == "task":
            return self._of_task()
        if self.kind == "math":
            from rlhfless_ray.reward.math_answer import math_reward, prepare

            prepare()
            return partial(math_reward, answer_column=self.answer_column)
        return getattr(UserFile(self.file, self.text).module(), self.name)

    def _of_task(self) -> RewardFunction:
        from rlhfless_ray.prompts.tasks import task

        verify = task(self.name).verify
        return lambda prompt, response, row: verify(response, row)


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
