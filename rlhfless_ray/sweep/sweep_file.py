"""Read a sweep's file: its runs, how many run at once, and which of them end early."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.local_path import LocalPath, given_path
from rlhfless_ray.recipe.mistakes import describe_mistake, section_at
from rlhfless_ray.recipe.reading import set_key
from rlhfless_ray.recipe.recipe_file import read_tree
from rlhfless_ray.recipe.run_sections import ClusterConfig
from rlhfless_ray.recipe.section import CountOrAuto, RunName, Section
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.recipe.yaml_text import as_texts

POLICY_METRICS = ("reward/mean", "eval/accuracy_sampled", "eval/accuracy_greedy", "learn/kl", "length/mean")
SUPERVISED_METRICS = ("learn/loss", "learn/accuracy", "eval/loss", "eval/accuracy")
WITHOUT_ACCURACY = ("sft", "kd")
OF_THE_FOLDER = ("logs", "recipes", "sweep.json", "report.html")  # names in the sweep's folder, which no run may have
OF_THE_SWEEP = (
    "run.name",
    "run.root",
    "cluster.address",
    "cluster.cpus",
    "cluster.local_nodes",
    "cluster.object_store_mb",
    "checkpoint.path",
)
OF_ITS_RAY = ("address", "cpus", "local_nodes")


class EarlyStopping(Section):
    """End runs that fall behind, by asynchronous successive halving (ASHA)."""

    first_step: int = Field(ge=1)
    """Step at which runs are compared for the first time."""
    keep: float = Field(0.5, gt=0, lt=1)
    """Share of the runs that continue after each comparison. The step of each comparison is `1 / keep` times that of the one before."""


class SweepRun(Section):
    """One run, or one for each point of the grid."""

    name: RunName = ""
    """Name of the run's folder below the sweep's. Empty: made from the grid's values."""
    recipe: LocalPath = ""
    """Recipe, relative to the sweep's file. Empty: the sweep's `recipe`."""
    set: JsonObject = Field({})
    """Dotted recipe keys and their values, which take precedence over those of the sweep."""
    alone: LocalPath = ""
    """Folder of a run that did the same work alone, for comparison."""


class SweepFile(Section):
    """A sweep, as `rlhfless sweep` reads it."""

    name: RunName = ""
    """Name of the sweep's folder below `root`. Empty: the file's name."""
    root: LocalPath = Field("runs", min_length=1)
    """Folder for the sweep's folder."""
    recipe: LocalPath = ""
    """Recipe of runs that name none, relative to the sweep's file."""
    set: JsonObject = Field({})
    """Dotted recipe keys and their values for every run."""
    grid: dict[str, list[object]] = Field({})
    """Dotted recipe keys, each with a list of values. There is one run for each combination."""
    runs: list[SweepRun] = Field([SweepRun()])
    """Single runs. With a grid, each of them at every point."""
    at_most: CountOrAuto = 2
    """Maximum number of runs at once. `auto`: as many as slots and memory are enough for."""
    metric: str = "eval/accuracy_sampled"
    """Metric by which runs are compared. Left out, it is the loss of supervised stages, on held-out rows if all have some."""
    direction: Literal["max", "min"] = "max"
    """Whether larger (`max`) or smaller values of the metric are better."""
    early_stopping: EarlyStopping | None = None
    """Runs that fall behind end early. None: all runs go to their end."""
    cluster: ClusterConfig = ClusterConfig()
    """Cluster of all runs. Without an address the sweep starts a private Ray for them."""

    @model_validator(mode="after")
    def _check(self) -> SweepFile:
        if not self.runs:
            raise ValueError("`runs` is empty; name a run, or leave the key out for one run at each point of `grid`")
        empty = [key for key, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"`grid`: `{empty[0]}` has no values")
        for key in [*self.set, *self.grid, *(key for run in self.runs for key in run.set)]:
            if key in OF_THE_SWEEP:
                raise ValueError(f"`{key}`: the sweep decides it for its runs; leave it out")
        for key, point in itertools.product(dict.fromkeys([*self.set, *(key for run in self.runs for key in run.set)]), self.grid):
            if key == point:
                raise ValueError(f"`{key}` stands in `set` and in `grid`, whose values win at every point; leave it out of one of them")
        for key in ("pool", "share", "priority", "memory_share"):
            if key in self.cluster.model_fields_set:
                raise ValueError(f"`cluster.{key}` is a setting of runs; put it under `set` as cluster.{key}")
        known = (*POLICY_METRICS, *SUPERVISED_METRICS)
        if self.metric not in known:
            near = difflib.get_close_matches(self.metric, known, n=1, cutoff=0.5)
            raise ValueError(
                f"unknown `metric` {self.metric}; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
            )
        return self


@dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep. `settings`: settings of this run that differ from others. `recipe`: validated, with name and folder."""

    name: str
    recipe: Recipe | SupervisedRecipe
    settings: Mapping[str, object] = field(default_factory=dict)
    alone: str = ""

    @cached_property
    def policy_key(self) -> str | None:
        """Key of an initial policy that is made from scratch, which runs with the same key share. None: the policy has a folder."""
        from rlhfless_ray.weights.load_policy import warm_start_key

        return warm_start_key(self.recipe) if isinstance(self.recipe, Recipe) and not self.recipe.policy.path else None


@dataclass(frozen=True)
class Sweep:
    file: SweepFile
    runs: tuple[PlannedRun, ...]


def load_sweep(path: Path) -> Sweep:
    """Read a sweep's file and every recipe that it makes. Raises UserError for the first mistake."""
    tree, path = read_tree(path, kind="sweep"), given_path(path, "sweep")
    tree["name"] = tree.get("name") or re.sub(r"[^\w.-]+", "-", path.stem).lstrip(".-")
    where = f"sweep {path}"
    try:
        file = SweepFile.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{where}: {describe_mistake(SweepFile, error)}") from None
    runs = tuple(_planned(file, given, point, path.parent, where) for given in file.runs for point in _points(file.grid))
    _check_names([run.name for run in runs], where)
    file = _with_loss(file, runs)
    _check_metric(file, runs, where)
    if file.metric.endswith("/loss") and file.direction == "max":
        raise UserError(f"{where}: direction: smaller values of {file.metric} are better; set it to min")
    if file.at_most != "auto":  # otherwise once their number is known
        check_shares(runs, file.at_most)
    return Sweep(file, runs)


def _with_loss(file: SweepFile, runs: Sequence[PlannedRun]) -> SweepFile:
    """Return the file with a loss as its metric if it names none and every run is a supervised stage."""
    if "metric" in file.model_fields_set or not all(isinstance(run.recipe, SupervisedRecipe) for run in runs):
        return file
    metric = "learn/loss" if any(_lacks_metric(run.recipe, "eval/loss") for run in runs) else "eval/loss"
    direction = file.direction if "direction" in file.model_fields_set else "min"
    return file.model_copy(update={"metric": metric, "direction": direction})


def _points(grid: Mapping[str, list[object]]) -> list[JsonObject]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _planned(file: SweepFile, given: SweepRun, point: JsonObject, folder: Path, where: str) -> PlannedRun:
    """Return one run of the sweep, its recipe validated."""
    source = given.recipe or file.recipe
    if not source:
        raise UserError(f"{where}: no recipe; name one in `recipe`, or in each of `runs`")
    words = [given.name, *(f"{key.rpartition('.')[2]}-{_word(value, file.grid[key])}" for key, value in point.items())]
    name = "_".join(filter(None, words)) or Path(source).stem
    settings = {**given.set, **point}
    tree = read_tree(folder / source)
    given_keys = {**file.set, **settings}
    kind = SupervisedRecipe if "task" in {**tree, **given_keys} else Recipe
    for key, value in given_keys.items():
        if isinstance(value, dict) and (section := section_at(kind, key.split("."))) is not None:
            first = next(iter(value), next(iter(section.model_fields)))
            raise UserError(f"{where}: `{key}` is a section, whose other keys of {source} would be lost; write `{key}.{first}`, with dots")
        set_key(tree, key, value, f"{where}: run {name}")
    tree["run"] = {**(tree.get("run") or {}), "name": name, "root": file.root}
    recipe = kind.parse(tree, where=f"{where}: run {name}")
    of_the_sweep = ("checkpoint.path", recipe.checkpoint.path), *((f"cluster.{key}", getattr(recipe.cluster, key)) for key in OF_ITS_RAY)
    if key := next((key for key, value in of_the_sweep if value), ""):
        raise UserError(f"{where}: run {name}: `{key}` of {source}: the sweep decides it for its runs; leave it out")
    return PlannedRun(name, recipe, settings, given.alone)


def _word(value: object, values: list[object]) -> str:
    """Return a grid's value as a part of a run's name, or its number if it is not a word or reads like another one."""
    texts = [f"{float(one):g}" if isinstance(one, float) else str(as_texts(one)) for one in values]
    text = texts[number := values.index(value)]
    return text if re.fullmatch(r"[\w.-]+", text) and texts.count(text) == 1 else str(number + 1)


def _check_names(names: Iterable[str], where: str) -> None:
    """Raise UserError for two runs of one name, and for a name that a resumed run of another name could take."""
    names = list(names)
    for name in names:
        if name in OF_THE_FOLDER:
            raise UserError(f"{where}: run {name}: the sweep's folder has a file or folder of that name; choose another `name`")
        if names.count(name) > 1:
            raise UserError(f"{where}: two runs are called {name}; give them different names with `name`")
        numbered = re.fullmatch(r"(.+)-\d+", name)
        if numbered and numbered[1] in names:
            raise UserError(f"{where}: runs {numbered[1]} and {name}: a repeated run would get the same number; rename one of them")


def check_shares(runs: Iterable[PlannedRun], at_most: int) -> None:
    """Raise UserError if runs that may work at the same time, `at_most` of them, ask for more than the whole pool."""
    shares = sorted((run.recipe.cluster.share or 0.0 for run in runs), reverse=True)[:at_most]
    if sum(shares) > 1 + 1e-9:
        raise UserError(
            f"cluster.share: {len(shares)} runs at once ask for shares of {sum(shares):g} of the pool together, "
            "which may be at most 1; lower their shares, or at_most"
        )


def _lacks_metric(recipe: Recipe | SupervisedRecipe, metric: str) -> str:
    """Return why a run never has a metric, or an empty string."""
    supervised = isinstance(recipe, SupervisedRecipe)
    if metric not in (SUPERVISED_METRICS if supervised else POLICY_METRICS):
        return f"{'supervised stages' if supervised else 'runs of a policy'} have no metric {metric}"
    if isinstance(recipe, SupervisedRecipe) and recipe.task in WITHOUT_ACCURACY and metric.endswith("/accuracy"):
        return f"a stage of the task {recipe.task} has no metric {metric}"
    if not metric.startswith("eval/"):
        return ""
    if isinstance(recipe, SupervisedRecipe):
        section = recipe.evaluate
        return "" if section.rows or section.path or section.train_share else f"evaluate.rows is 0, so it has no {metric}"
    if metric == "eval/accuracy_greedy" and not recipe.evaluate.greedy:
        return f"evaluate.greedy is false, so it has no {metric}"
    return "" if recipe.evaluate.prompts else f"evaluate.prompts is 0, so it has no {metric}"


def _check_metric(file: SweepFile, runs: Sequence[PlannedRun], where: str) -> None:
    """Raise UserError if no run has the metric that the file names, or if one lacks the metric that decides which runs end early."""
    lacking = [(run, why) for run in runs if (why := _lacks_metric(run.recipe, file.metric))]
    if file.early_stopping is None:
        if "metric" in file.model_fields_set and len(lacking) == len(runs):
            raise UserError(f"{where}: run {lacking[0][0].name}: {lacking[0][1]}, and no other run has it; name another `metric`")
        return
    for run, why in lacking:
        raise UserError(f"{where}: run {run.name}: {why}, which early_stopping needs")
    for run in runs:
        first, steps = file.early_stopping.first_step, run.recipe.run.steps
        if steps is not None and first >= steps:
            raise UserError(f"{where}: early_stopping.first_step: {first} is not before the end of run {run.name}, which has {steps} steps")
        every = run.recipe.evaluate.every_steps
        if not file.metric.startswith("eval/") or getattr(run.recipe.evaluate, "each_epoch", False):
            continue
        if not every or (steps is not None and math.ceil(first / every) * every >= steps):
            raise UserError(
                f"{where}: run {run.name}: evaluate.every_steps is {every}, so between early_stopping.first_step {first} and its end "
                f"it has no {file.metric}, and would never end early; set it to {first}"
            )
