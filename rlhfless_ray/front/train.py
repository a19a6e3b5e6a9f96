"""Train with one call: a policy, prompts and a reward in, a trained run out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.front.callbacks import Callbacks
from rlhfless_ray.front.trained_run import TrainedRun
from rlhfless_ray.prompts.given_rows import keep_rows
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.given_functions import RewardFunction, keep_functions
from rlhfless_ray.reward.reward_functions import BUILT_IN

GIVEN = ".given"  # folder of rows and functions, beside the run folders
HELD_OUT, HELD_OUT_SHARE = 256, 10  # of given rows: at most so many, and at most a tenth

Rewards = RewardFunction | str | Sequence[RewardFunction]


def make_recipe(
    policy: str = "",
    prompts: str | Iterable[JsonObject] | None = None,
    reward: Rewards | None = None,
    *,
    reward_weights: Sequence[float] | None = None,
    evaluate: str | Iterable[JsonObject] | None = None,
    max_rows: int | None = None,
    **settings: object,
) -> Recipe:
    """Return the recipe that `train` runs with these arguments. It names files in which rows and functions are kept.

    Args:
        policy: a model folder, or a model's name on the Hugging Face hub. Empty: the built-in policy of a built-in task.
        prompts: a path, a name on the hub, a built-in task, a list of dicts, or a `datasets.Dataset`, also a streamed one. The column
            `prompt` or `question` has texts or turns; turns get the policy's chat template. The other columns are for the reward.
        reward: `(prompt, response, row) -> float`, TRL's `(completions, **columns) -> list[float]`, either also async, or several of
            these. Or a text: `math`, `task`, `file.py:name`, an address, or the folder of a reward model.
        reward_weights: factors of several rewards in their sum; 1 each by default. A reward of None does not count.
        evaluate: held-out prompts, as `prompts`. None: of given rows a tenth, 256 at most, is held out of training.
        max_rows: most rows to take, which a streamed data set needs.
        settings: a recipe's sections as dicts, such as `rollout={"max_tokens": 256}`, or its keys, `**{"rollout.max_tokens": 256}`.

    Raises:
        UserError: For the first mistake.

    Examples:
        >>> from rlhfless_ray import make_recipe
        >>> recipe = make_recipe(prompts="chain", reward="task", rollout={"max_tokens": 64}, run={"steps": 2})
        >>> recipe.prompts.task, recipe.reward.function, recipe.rollout.max_tokens
        ('chain', 'task', 64)
    """
    tree = _sections(settings)
    run, section = tree.setdefault("run", {}), tree.setdefault("prompts", {})
    run.setdefault("name", Path(sys.argv[0]).stem or "run")
    folder = Path(str(run.get("root", Recipe.model_fields["run"].default.root))) / GIVEN
    if policy:
        tree.setdefault("policy", {})["path"] = str(policy)
    if max_rows is not None:
        section["max_rows"] = max_rows
    if isinstance(prompts, (str, Path)):
        section["task" if str(prompts) in ("chain", "sort") and not Path(prompts).exists() else "path"] = str(prompts)
    elif prompts is not None:
        path, first, rows = keep_rows(prompts, folder, "prompts", max_rows)
        section |= {"path": str(path)} | {key: value for key, value in _columns(first).items() if key not in section}
        if evaluate is None:
            tree.setdefault("evaluate", {}).setdefault("prompts", min(HELD_OUT, rows // HELD_OUT_SHARE))
    if isinstance(evaluate, (str, Path)):
        tree.setdefault("evaluate", {})["path"] = str(evaluate)
    elif evaluate is not None:
        tree.setdefault("evaluate", {})["path"] = str(keep_rows(evaluate, folder, "evaluate", max_rows)[0])
    tree["reward"] = tree.get("reward", {}) | _reward(reward, reward_weights, folder)
    return Recipe.parse(tree, where="train")


def train(
    policy: str = "",
    prompts: str | Iterable[JsonObject] | None = None,
    reward: Rewards | None = None,
    *,
    reward_weights: Sequence[float] | None = None,
    evaluate: str | Iterable[JsonObject] | None = None,
    max_rows: int | None = None,
    callbacks: Sequence[object] = (),
    resume: bool | Literal["previous"] = False,
    **settings: object,
) -> TrainedRun:
    """Train a policy on prompts for a reward. Returns the run, with its trained policy.

    Args:
        policy: as in `make_recipe`, and so are `prompts` to `max_rows`, and the settings.
        prompts: see there.
        reward: see there.
        reward_weights: see there.
        evaluate: see there.
        max_rows: see there.
        callbacks: objects with methods of `transformers.TrainerCallback`, as far as they have the same meaning here.
        resume: continue the newest run of this name.
        settings: see there.

    Raises:
        UserError: For mistakes in the arguments or the data.
        RunError: If the run fails.

    Examples:
        >>> from rlhfless_ray import train
        >>> quiet = {"watch": {"progress": "off", "wandb": "off"}, "warm_start": {"steps": 0}}
        >>> run = train(prompts="chain", reward=lambda prompt, response, row: -len(response), run={"steps": 1}, **quiet)
        >>> run.metrics[-1]["step"], run.policy.folder.name
        (1, 'model')
    """
    recipe = make_recipe(policy, prompts, reward, reward_weights=reward_weights, evaluate=evaluate, max_rows=max_rows, **settings)
    return run_recipe(recipe, callbacks, resume)


def run_recipe(recipe: Recipe, callbacks: Sequence[object] = (), resume: bool | Literal["previous"] = False) -> TrainedRun:
    """Run a recipe to its end, or until a callback stops it."""
    from rlhfless_ray.runtime.runtime import Runtime

    if recipe.watch.progress != "off":
        print(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False), end="", file=sys.stderr)
    with Runtime(recipe, resume=resume) as run:
        heard = Callbacks(callbacks, run.recipe, run.folder.path)
        for step in run:
            if heard.stops_after(step):
                break
        heard.end()
    return TrainedRun(run.folder.path)


def _sections(settings: Mapping[str, object]) -> dict[str, JsonObject]:
    """Return settings as a tree of sections. Keys may name a section or, with a point, a key of one."""
    tree: dict[str, JsonObject] = {}
    for name, value in settings.items():
        section, point, key = name.partition(".")
        if not point and not isinstance(value, Mapping):
            raise UserError(f"train: `{name}` is a section of the recipe; give a dict, such as {name}={{...}}, or keys such as `{name}.…`")
        of_section = tree.setdefault(section, {})
        if isinstance(value, Mapping) and not point:
            of_section.update(value)
            continue
        *parents, last = key.split(".")
        for parent in parents:
            of_section = of_section.setdefault(parent, {})
        of_section[last] = value
    return tree


def _columns(first: JsonObject) -> JsonObject:
    """Return the settings of `prompts` that follow from the first row."""
    column = next((name for name in ("prompt", "question") if name in first), "prompt")
    answer = next((name for name in ("answer", "solution", "ground_truth") if name in first), "")
    return {"prompt_column": column, "answer_column": answer, "template": "chat" if isinstance(first.get(column), list) else "none"}


def _reward(reward: Rewards | None, weights: Sequence[float] | None, folder: Path) -> JsonObject:
    """Return the settings of `reward`."""
    if isinstance(reward, (str, Path)):
        return reward_settings(str(reward))
    if reward is None:
        return {}
    functions: list[RewardFunction] = [reward] if callable(reward) else list(reward)
    if not functions or any(isinstance(one, (str, Path)) for one in functions):
        raise UserError("reward: several rewards must be functions; a reward model or a server is the only reward of a run")
    return {"function": keep_functions(functions, [1.0] * len(functions) if weights is None else weights, folder)}


def reward_settings(name: str) -> JsonObject:
    """Return the settings of `reward` for a built-in function, a file's function, an address, or the folder of a reward model."""
    if "://" in name:
        return {"url": name}
    return {"function": name} if name in BUILT_IN or ".py:" in name else {"model_path": name}
