"""The recipe of `rlhfless generate` and `rlhfless evaluate`: a run's recipe without the settings of learning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field, PrivateAttr

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.local_path import given_path
from rlhfless_ray.recipe.reading import apply_override, merge_sections
from rlhfless_ray.recipe.recipe_file import read_tree
from rlhfless_ray.recipe.rollout_sections import RolloutConfig

OF_LEARNING = ("task", "data", "loss", "teacher", "algorithm", "learner", "critic", "reference", "lora", "ema", "checkpoint", "save")
OF_STEPS = {
    "run": ("steps", "episodes", "epochs", "min_ranks", "max_restarts", "deterministic", "exact"),
    "evaluate": ("rows", "each_epoch", "every_steps", "greedy", "source_column"),
    "rollout": ("max_lag_steps", "partial", "partial_kv", "oversample", "ahead", "agreement", "drafter_train"),
}
FIXED: dict[str, JsonObject] = {
    "run": {"episodes": 1},
    "prompts": {"shuffle": False},
    "learner": {"overlap": "off", "zero_stage": 1},
    "checkpoint": {"memory_every_steps": 0},
}
BATCH_PROMPTS = 256


class GenerationRollout(RolloutConfig):
    temperature: float = Field(1.0, ge=0)
    """Temperature of the sampling distribution. 0 is greedy."""


class GenerationRecipe(Recipe):
    """A recipe without a learner. It may have no reward; responses are not scored then.

    Examples:
        >>> GenerationRecipe.read(None, ["prompts.task=chain", "rollout.temperature=0"]).prompts.batch_prompts
        256
    """

    rollout: GenerationRollout = GenerationRollout()
    learns: ClassVar[bool] = False
    from_dict: ClassVar[str] = "of"
    _left_out: tuple[str, ...] = PrivateAttr(())  # sections and keys that only learning has

    @property
    def left_out_note(self) -> str:
        """Message for the user about settings that were left out, else an empty string."""
        return f"left out, because nothing is trained: {', '.join(self._left_out)}" if self._left_out else ""

    @classmethod
    def read(cls, path: str | Path | None, overrides: Sequence[str] = (), name: str = "generate") -> GenerationRecipe:
        """Read a recipe's file, which may be that of a training run, and apply overrides of the form `section.key=value`.

        Sections and keys that only learning needs are left out. `name`: name of the run, if neither file nor override sets it.

        Raises:
            UserError: As `Recipe.load`, and for a recipe with an agent.
        """
        tree: JsonObject = {}
        if path is None:
            for override in overrides:
                apply_override(tree, override, cls)
        else:
            tree, path = read_tree(path, overrides, model=cls), given_path(path, cls.kind)
            name = re.sub(r"[^\w.-]+", "-", f"{path.stem}-{name}").lstrip(".-")
        where = "recipe" if path is None else f"recipe {path}"
        recipe = cls.of(tree, name, where)
        if path is not None and (named := recipe.read_from(path, overrides)._named) is not None:
            recipe._left_out = tuple(one for one in recipe._left_out if any(f"{key}.".startswith(f"{one}.") for key in named))
        return recipe

    @classmethod
    def of(cls, tree: JsonObject, name: str = "generate", where: str = "recipe") -> GenerationRecipe:
        """Validate a nested dict as `read` does."""
        if not isinstance(tree, dict):
            return cls.parse(tree, where=where)  # which refuses it
        left_out = [section for section in tree if section in OF_LEARNING]
        tree = {section: keys for section, keys in tree.items() if section not in OF_LEARNING}
        for section, dropped in OF_STEPS.items():
            if isinstance(own := tree.get(section), dict):
                tree[section] = {key: value for key, value in own.items() if key not in dropped}
                left_out += [f"{section}.{key}" for key in own if key in dropped]
        if isinstance(own := tree.get("prompts"), dict) and own.get("shuffle"):
            left_out.append("prompts.shuffle")
        if isinstance(agent := tree.get("agent"), dict) and (agent.get("path") or agent.get("command")):
            raise UserError(f"{where}: agent: `rlhfless generate` and `evaluate` have no agents; name a reward instead, or none")
        tree = merge_sections(FIXED, tree, wins=True)
        tree = merge_sections({"prompts": {"batch_prompts": BATCH_PROMPTS, **({} if tree.get("reward") else {"answer_column": ""})}}, tree)
        if isinstance(run := tree["run"], dict) and not run.get("name"):
            run["name"] = name
        recipe = cls.parse(tree, where=where)
        recipe._left_out = tuple(left_out)
        return recipe
