"""A workflow as a file: stages that train, generate or evaluate, each a recipe that may name results of earlier stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.local_path import LocalPath
from rlhfless_ray.recipe.reading import merge_sections
from rlhfless_ray.recipe.recipe_file import RecipeFile
from rlhfless_ray.recipe.section import RunName, Section
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

Kind = Literal["train", "generate", "evaluate"]
KINDS: tuple[Kind, ...] = ("train", "generate", "evaluate")
NAME, REFERENCE = r"^[A-Za-z][\w-]*$", re.compile(r"\$\{([\w-]+)\}")
PAIRS, RESPONSES = "pairs.jsonl", "responses.jsonl"
ROUND = "round"
POLICY, REWARD_MODEL, DATA_SET = "policy", "reward model", "data set"
USES = {
    "policy.path": POLICY,
    "reference.path": POLICY,
    "teacher.path": POLICY,
    "reward.model_path": REWARD_MODEL,
    "data.path": DATA_SET,
    "prompts.path": DATA_SET,
}
"""Keys of recipes that may name a stage's result, and what it must be."""


class WorkflowStage(Section):
    """One stage, or with `repeat` several that are repeated. A text `${name}` in a recipe is the result of the stage `name`: the
    model folder of `train`, the preference pairs of `generate` (without a reward its responses). `${round}` is the number of the round."""

    name: str = Field("", pattern=f"{NAME}|^$")
    """Name of the stage's run folder. In a repetition `-<round>` follows."""
    train: JsonObject | None = None
    """A recipe of a training run, or with `task` of a supervised stage."""
    generate: JsonObject | None = None
    """A recipe of `rlhfless generate`. With a reward, `pairs.jsonl` has the best and the worst response to each prompt."""
    evaluate: JsonObject | None = None
    """A recipe of `rlhfless evaluate`."""
    models: list[str] = Field(default_factory=list)
    """evaluate: the stages whose models are compared."""
    repeat: int = Field(0, ge=0)
    """Number of rounds of `stages`. A result of a stage that comes later in the round is that of the round before."""
    start: dict[str, str] = Field(default_factory=dict)
    """repeat: the stage whose result replaces that of such a stage in the first round."""
    stages: list[WorkflowStage] = Field(default_factory=list)
    """repeat: the stages of a round."""

    @model_validator(mode="after")
    def _check_kind(self) -> WorkflowStage:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if self.repeat:
            if kinds or self.models or not self.stages:
                raise ValueError("a stage with `repeat` has `stages` and nothing else but `start`")
            if any(stage.repeat for stage in self.stages):
                raise ValueError("a stage with `repeat` holds no other `repeat`; write the inner one out")
            if unknown := [name for name in self.start if name not in {stage.name for stage in self.stages}]:
                raise ValueError(f"`start`: `{unknown[0]}` is none of the repeated stages")
        elif len(kinds) != 1 or not self.name or self.stages or self.start:
            raise ValueError("a stage has a `name` and one of `train`, `generate` and `evaluate`")
        elif bool(self.models) != (self.evaluate is not None):
            raise ValueError("`models` names the stages that `evaluate` compares")
        return self


class WorkflowRun(Section):
    name: RunName = ""
    """Name of the workflow's folder below `root`. Empty: the file name."""
    root: LocalPath = Field("runs", min_length=1)
    """Folder for workflow folders."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its recipe, whose references are paths. `models`: stage → model folder, of an evaluation."""

    name: str
    kind: Kind
    tree: JsonObject
    recipe: Recipe | SupervisedRecipe | GenerationRecipe
    models: dict[str, Path]

    @property
    def makes_pairs(self) -> bool:
        return isinstance(self.recipe, GenerationRecipe) and self.recipe.scores

    @property
    def result(self) -> tuple[str, str]:
        """Name of the result in the stage's folder, and what it is."""
        if self.kind == "train":
            return "model", REWARD_MODEL if _setting(self.recipe, "task") == "rm" else POLICY
        return (PAIRS if self.makes_pairs else RESPONSES), DATA_SET


class Workflow(RecipeFile):
    """Stages in order, and settings of all of them.

    Examples:
        >>> stage = {"name": "sft", "train": {"task": "sft", "data": {"task": "chain"}}}
        >>> [one.name for one in Workflow.parse({"run": {"name": "mine"}, "stages": [stage]}).plan()]
        ['sft']
    """

    run: WorkflowRun = WorkflowRun()
    settings: dict[str, JsonObject] = Field(default_factory=dict)
    """Sections that every stage's recipe gets, such as `watch` and `cluster`. A recipe's own keys take precedence."""
    stages: list[WorkflowStage] = Field(min_length=1)
    kind: ClassVar[str] = "workflow"

    @property
    def folder(self) -> Path:
        return Path(self.run.root) / self.run.name

    def plan(self) -> list[PlannedStage]:
        """Return every stage in order, repetitions written out.

        Raises:
            UserError: For a mistake in a recipe or a reference, with the stage's name.
        """
        planned: list[PlannedStage] = []
        results: dict[str, str] = {}
        made: dict[str, tuple[str, str]] = {}  # path of a result → its stage, and what it is
        for stage, name, resolve in _expand(self.stages, results):
            if any(one.name == name for one in planned):
                raise UserError(f"stages: two stages are called {name}; rename one")
            kind = next(kind for kind in KINDS if getattr(stage, kind) is not None)
            own = getattr(stage, kind)
            tree = _resolved(merge_sections(self.settings, own, model=_recipe_class(kind, own)), resolve)
            models = {model: Path(resolve(model)) for model in stage.models}
            planned.append(PlannedStage(name, kind, tree, self._recipe(kind, name, tree, models), models))
            _check_uses(planned[-1], made)
            if kind != "evaluate":
                file, what = planned[-1].result
                results[name] = str(self.folder / name / file)
                made[results[name]] = name, what
        return planned

    def _recipe(self, kind: Kind, name: str, tree: JsonObject, models: dict[str, Path]) -> Recipe | SupervisedRecipe | GenerationRecipe:
        where, run = f"stage {name}", tree.get("run")
        if isinstance(run, dict) and (decided := [key for key in ("name", "root") if key in run]):
            raise UserError(f"{where}: run.{decided[0]}: the workflow decides it for its stages; leave it out")
        tree = merge_sections({"run": {"root": str(self.folder), "name": name}}, tree, wins=True)
        if kind == "train":
            return _recipe_class(kind, tree).parse(tree, where=where)
        if models:
            tree = merge_sections({"policy": {"path": str(next(iter(models.values())))}}, tree, wins=True)
        return GenerationRecipe.of(tree, name, where)


def _recipe_class(kind: Kind, tree: JsonObject) -> type[Recipe] | type[SupervisedRecipe]:
    """Return the class of a stage's recipe; that of `generate` and `evaluate` has the sections of a run."""
    return SupervisedRecipe if kind == "train" and "task" in tree else Recipe


Resolve = Callable[[str], str]


def _check_uses(stage: PlannedStage, made: dict[str, tuple[str, str]]) -> None:
    """Raise UserError if a stage uses the result of an earlier one as something else."""
    uses = {f"models: {name}": str(path) for name, path in stage.models.items()} | {key: _setting(stage.recipe, key) for key in USES}
    for key, value in uses.items():
        name, what = made.get(str(value), ("", ""))
        wanted = USES.get(key, POLICY)
        if name and what != wanted and not (key == "policy.path" and what == REWARD_MODEL and _setting(stage.recipe, "task") == "rm"):
            raise UserError(f"stage {stage.name}: {key}: the result of stage {name} is a {what}, not a {wanted}")


def _expand(stages: Sequence[WorkflowStage], results: dict[str, str]) -> Iterator[tuple[WorkflowStage, str, Resolve]]:
    """Yield every stage with its name and a function from names to results. Before the next stage, the caller adds its result."""

    def resolver(numbers: dict[str, str], where: str) -> Resolve:
        def resolve(name: str) -> str:
            if name in numbers:
                return numbers[name]
            if name not in results:
                known = ", ".join(f"`{one}`" for one in results) or "none yet"
                raise UserError(f"stage {where}: `${{{name}}}` is no earlier stage with a result; there are {known}")
            return results[name]

        return resolve

    for stage in stages:
        if not stage.repeat:
            yield stage, stage.name, resolver({}, stage.name)
            continue
        for inner, source in stage.start.items():
            results[inner] = resolver({}, "with repeat")(source)
        for number in range(1, stage.repeat + 1):
            for inner_stage in stage.stages:
                name = f"{inner_stage.name}-{number}"
                yield inner_stage, name, resolver({ROUND: str(number)}, name)
                if name in results:
                    results[inner_stage.name] = results[name]


def _resolved(value: object, resolve: Resolve) -> Any:
    """Replace references in all texts of a tree."""
    if isinstance(value, str):
        return REFERENCE.sub(lambda match: resolve(match[1]), value)
    if isinstance(value, list):
        return [_resolved(item, resolve) for item in value]
    return {key: _resolved(item, resolve) for key, item in value.items()} if isinstance(value, dict) else value


def _setting(recipe: object, key: str) -> object:
    """Return a value of a recipe, None if it has no such key."""
    section, _, name = key.partition(".")
    value = getattr(recipe, section, None)
    return getattr(value, name, None) if name else value
