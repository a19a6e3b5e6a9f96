"""Reward functions `(prompt, response, row) -> float`, shipped as plain data and called with a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.reward.source import Decode, Score, Source, Worker
from rlhfless_ray.reward.time_limit import TimeLimit, TimeLimitExceeded
from rlhfless_ray.reward.user_file import UserFile
from rlhfless_ray.reward.values import describe_exception, timeout_message, to_finite_float

if TYPE_CHECKING:
    from rlhfless_ray.types import Sample

BUILT_IN = ("task", "math", "code")  # values of `reward.function` that name no file
RewardFunction = Callable[[str, str, JsonObject], float]


@dataclass(frozen=True)
class RewardSource(Source):
    """A function `(prompt, response, row) -> float`: a task's verifier, `math`, `code`, or one of a user's file."""

    kind: str  # "task", "math", "code" or "file"
    name: str  # the task's name, or the function's
    answer_column: str = ""  # for "math" and "code"
    file: UserFile | None = None  # for "file"

    def item(self, key: int, sample: Sample, decode: Decode) -> tuple[int, str, str, JsonObject]:
        return key, sample.prompt.text, sample.text, dict(sample.prompt.row)  # a plain dict also of a `TableRow`

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        return RewardWorker(self, timeout_s)

    def build(self, timeout_s: float) -> RewardFunction:
        """Build the function, of which a call has `timeout_s` seconds. For a file this runs its top-level code."""
        if self.kind == "task":
            from rlhfless_ray.prompts.builtin_tasks import task

            verify = task(self.name).verify
            return lambda prompt, response, row: verify(response, row)
        if self.kind == "math":
            from rlhfless_ray.reward.math_answer import math_reward, prepare

            prepare()
            return partial(math_reward, answer_column=self.answer_column)
        if self.kind == "code":
            from rlhfless_ray.reward.code_tests import LIMIT_SHARE, code_reward

            return partial(code_reward, tests_column=self.answer_column, limit_s=LIMIT_SHARE * timeout_s)
        assert self.file is not None
        return getattr(self.file.module(), self.name)


class RewardWorker(Worker):
    """Call a reward function `(prompt, response, row) -> float` in a process's main thread."""

    def __init__(self, source: RewardSource, timeout_s: float) -> None:
        self.source, self.timeout_s = source, timeout_s
        self.function = source.build(timeout_s)
        self.limit = TimeLimit()

    def score(self, items: list[tuple[int, str, str, JsonObject]], budget_s: float = math.inf) -> list[Score]:
        """Return scores of (key, prompt, response, row) items in order, only of the first ones if `budget_s` is over.

        A sample gets a Score with an error if the function raises, takes longer than `timeout_s`, or does not return a finite
        number.
        """
        end = time.monotonic() + budget_s
        scores: list[Score] = []
        with self.limit.listening():
            for item in items:
                scores.append(self._score_one(*item))
                if time.monotonic() >= end:
                    break
        return scores

    def _score_one(self, key: int, prompt: str, response: str, row: JsonObject) -> Score:
        row = deepcopy(row)  # all responses to a prompt have the same one, which the function may change
        try:
            value = self.limit.call(self.timeout_s, self.function, prompt, response, row)
        except TimeLimitExceeded:
            return Score(key, None, timeout_message(self.timeout_s))
        except (Exception, SystemExit) as error:
            return Score(key, None, describe_exception(error, self.source.file))
        try:
            return Score(key, to_finite_float(value))
        except ValueError as error:
            return Score(key, None, f"`{self.source.name}` returned {error}")
