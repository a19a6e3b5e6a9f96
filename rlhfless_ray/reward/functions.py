"""The reward as a value: found and checked on the driver, shipped as plain data, built where it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rlhfless_ray.errors import UserError
from rlhfless_ray.reward.user_file import UserFile, function_of

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.reward.worker import Score
    from rlhfless_ray.types import Sample

RewardFunction = Callable[[str, str, dict[str, Any]], float]
Decode = Callable[[list[int]], str]  # token ids → text, special tokens kept
CONTRACT = "def {name}(prompt: str, response: str, row: dict) -> float"


class Worker:
    """What a scoring process holds."""

    def score(self, items: list[Any], budget_s: float) -> list[Score]:
        """Of as many items as were done in that time; of none where something is waited for."""
        raise NotImplementedError

    def open(self, threads: int) -> None:
        """Its slots have so many cores."""

    def park(self) -> None:
        """Leave the device: the slot goes to others."""


class Source:
    """Everything that scoring processes, on other machines too, need. It pickles."""

    pool_kind: ClassVar[str] = "score"  # the function whose processes score
    on_device: ClassVar[bool] = False  # whether they hold a device's memory

    def item(self, key: int, sample: Sample, decode: Decode) -> tuple[Any, ...]:
        """What a worker is given of a sample; `key` comes first."""
        raise NotImplementedError

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        raise NotImplementedError

    def call_s(self, timeout_s: float) -> float:
        """The longest that a worker may take beyond the time it was asked to answer in."""
        return timeout_s


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
        from rlhfless_ray.reward.worker import RewardWorker

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


def load_reward(recipe: Recipe, tokenizer: Any = None) -> Source:
    """What the recipe says rewards come from, checked as far as can be without scoring anything.

    Runs the top-level code of a user's file once. Raises UserError for a missing file or function, a syntax or import
    error (with its line), something that is not callable, and other parameters; for an address that is none, and for a model
    that gives no single score or has other tokens than the policy's `tokenizer`.
    """
    reward, column = recipe.reward, recipe.answer_column
    if recipe.agent.path:
        from rlhfless_ray.agent.load import AgentSource

        return AgentSource.load(recipe.agent.path)
    if reward.url:
        from rlhfless_ray.reward.http import HttpSource

        return HttpSource.load(reward.url, column, reward.deadline_s, reward.batch_samples)
    if reward.model_path:
        from rlhfless_ray.reward.model import ModelSource

        return ModelSource.load(recipe, tokenizer)
    function = reward.function
    if reward.contract == "openrlhf" and function in ("task", "math"):
        raise UserError(f"reward.contract: `openrlhf` is for functions of a file, not for reward.function `{function}`; leave it out")
    if function == "task":
        return RewardSource("task", recipe.prompts.task)
    if function == "math":
        if not column:
            raise UserError("reward.function: `math` compares with the reference answer; set prompts.answer_column")
        return RewardSource("math", "math_reward", answer_column=column)
    path, colon, name = function.rpartition(":")
    if not colon or not path or not name:
        raise UserError(f"reward.function: `{function}` is none of `task`, `math` and `path/to/file.py:name`")
    if reward.contract == "openrlhf":
        from rlhfless_ray.reward.queries import QuerySource

        return QuerySource.load(path, name, column, reward.batch_samples)
    where = f"reward.function {function}"
    file = UserFile.read(path, where)
    function_of(file.checked_module(where), name, CONTRACT.format(name=name), ("", "", {}), where)
    return RewardSource("file", name, file=path, text=file.text)
