"""Find and check the recipe's reward source on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.reward.given_functions import SUFFIX, GivenSource
from rlhfless_ray.reward.reward_functions import BUILT_IN, RewardSource
from rlhfless_ray.reward.source import Source
from rlhfless_ray.reward.user_file import read_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.recipe import Recipe

CONTRACT = "def {name}(prompt: str, response: str, row: dict) -> float"


def load_reward(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> Source:
    """Return the recipe's reward source, checked as far as possible without scoring anything.

    Runs the top-level code of a user's file once. Raises UserError for a missing file or function, a syntax or import error (with its
    line), and an object that is not callable or has other parameters. Also raises it for an invalid address, and for a model without a
    single score or with other tokens than the policy's `tokenizer`.
    """
    reward, column = recipe.reward, recipe.answer_column
    if recipe.agent.path:
        from rlhfless_ray.agent.load_agent import AgentSource

        return AgentSource.load(recipe.agent.path)
    if recipe.agent.command:
        from rlhfless_ray.door.command_agent import CommandSource

        return CommandSource.load(recipe.agent.command, recipe.agent.programs)
    if reward.url:
        from rlhfless_ray.reward.http_reward import HttpSource

        return HttpSource.load(reward.url, column, reward.deadline_s, reward.batch_samples)
    if reward.model_path:
        from rlhfless_ray.reward.reward_model import RewardModelSource

        return RewardModelSource.load(recipe, tokenizer)
    function = reward.function
    if not function and not recipe.learns:
        return Source()  # nothing is scored
    if reward.contract == "openrlhf" and function in BUILT_IN:
        raise UserError(f"reward.contract: `openrlhf` is for functions of a file, not for reward.function `{function}`; leave it out")
    if function == "task":
        return RewardSource("task", recipe.prompts.task)
    if function == "math":
        if not column:
            raise UserError("reward.function: `math` compares with the reference answer; set prompts.answer_column")
        return RewardSource("math", "math_reward", answer_column=column)
    if function == "code":
        if not column:
            raise UserError("reward.function: `code` runs the tests of a column; set prompts.answer_column to it")
        return RewardSource("code", "code_reward", answer_column=column)
    path, colon, name = function.rpartition(":")
    if path.endswith(SUFFIX):
        return GivenSource.load(path, name, reward.batch_samples, recipe.prompts.prompt_column)
    if not colon or not path or not name:
        raise UserError(f"reward.function: `{function}` is none of `task`, `math`, `code` and `path/to/file.py:name`")
    if reward.contract == "openrlhf":
        from rlhfless_ray.reward.openrlhf_reward import QuerySource

        return QuerySource.load(path, name, column, reward.batch_samples)
    return RewardSource("file", name, file=read_function(path, name, CONTRACT.format(name=name), ("", "", {})))
