"""Evaluate several models on the same prompts, side by side, without training."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from itertools import takewhile
from pathlib import Path

import numpy as np

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.prompts.load_prompts import load_prompts
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.local_path import given_path
from rlhfless_ray.recipe.without_effect import sentences
from rlhfless_ray.report.read_run import RunRecord
from rlhfless_ray.run.find_model import find_model
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.run.responses import RECORD, RESPONSES, read_groups
from rlhfless_ray.runtime.generation import Generation
from rlhfless_ray.types import Prompt
from rlhfless_ray.weights.load_policy import context_tokens, initial_policy, policy_tokenizer
from rlhfless_ray.weights.model_folder import parameter_count

FILE = "evaluation.json"


@dataclass(frozen=True)
class ModelScore:
    """The score of a model on a data set.

    Attributes:
        mean: mean reward over prompts and responses; pass@1 if rewards are 0 or 1.
        error: standard error of `mean` over prompts.
        pass_at: k → mean over prompts of the expected best reward of k responses (unbiased).
        difference: `mean` minus the first model's, on the same prompts.
        unscored: number of responses without a reward, which are left out.
    """

    model: str
    data: str
    prompts: int
    samples_per_prompt: int
    mean: float
    error: float
    pass_at: dict[int, float]
    difference: float
    difference_error: float
    length_mean: float
    truncated_share: float
    unscored: int


@dataclass(frozen=True)
class Evaluation:
    """Scores of all models on all data sets, and the costs of each model's responses."""

    scores: list[ModelScore]
    costs: dict[str, dict[str, float]] = field(default_factory=dict)  # model → slot_s, money, tokens_per_s

    @classmethod
    def read(cls, folder: str | Path) -> Evaluation:
        """Read the result from its folder.

        Examples:
            >>> from rlhfless_ray import Evaluation
            >>> from pathlib import Path
            >>> _ = Path("evaluation.json").write_text('{"scores": [], "costs": {}}')
            >>> Evaluation.read(".").scores
            []
        """
        content = json.loads((Path(folder) / FILE).read_text())
        scores = [{**score, "pass_at": {int(k): value for k, value in score["pass_at"].items()}} for score in content["scores"]]
        return cls([ModelScore(**score) for score in scores], content["costs"])

    def rows(self) -> list[list[str]]:
        """Return the table's cells, with a heading. Responses without a reward have a column if there are any."""
        ks = sorted({k for score in self.scores for k in score.pass_at})
        has_unscored = any(score.unscored for score in self.scores)
        last = ["length", "cut", *(["unscored"] if has_unscored else []), "slot-s"]
        head = ["model", "data", "prompts", "mean", *(f"pass@{k}" for k in ks), "difference", *last]
        first = self.scores[0].model if self.scores else ""
        rows = [
            [
                *(s.model, s.data, str(s.prompts), f"{s.mean:.3f} ± {s.error:.3f}"),
                *(f"{s.pass_at[k]:.3f}" if k in s.pass_at else "" for k in ks),
                "" if s.model == first else f"{s.difference:+.3f} ± {s.difference_error:.3f}",
                *(f"{s.length_mean:.1f}", f"{s.truncated_share:.0%}"),
                *([str(s.unscored)] if has_unscored else []),
                f"{self.costs[s.model]['slot_s']:.0f}" if s.model in self.costs else "",
            ]
            for s in self.scores
        ]
        return [head, *rows]

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        head, *rows = self.rows()
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        return (
            f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def with_own_folder(recipe: GenerationRecipe, *, resume: bool) -> GenerationRecipe:
    """Return the recipe with a run.name whose folder is no training run's: the first of `<name>`, `<name>-2`, … that is free.

    `resume`: the newest evaluation among these instead, or a free name if there is none.
    """
    paths = list(RunFolder.candidates(recipe))
    taken = list(takewhile(Path.exists, paths))
    evaluations = [path for path in taken if not (path / "recipe.yaml").exists()]
    chosen = evaluations[-1] if resume and evaluations else paths[len(taken)]
    return recipe.with_settings({"run.name": chosen.name})


def evaluate(
    recipe: GenerationRecipe,
    models: Sequence[str | Path],
    data: Sequence[str] = (),
    ks: Sequence[int] = (),
    *,
    labels: Sequence[str] = (),
    resume: bool = False,
) -> Evaluation:
    """Evaluate models on the same prompts with the same random numbers.

    The responses of each model are in a run folder of its own, below `<run.root>/<run.name>/`, beside `evaluation.json`.

    Args:
        recipe: Its section `evaluate` has the number of responses to each prompt, and their temperature.
        models: Model folders, names on the hub, checkpoints or run folders. Differences are to the first one.
        data: Data sets, as in `prompts.path`. None: the recipe's held-out prompts.
        ks: Numbers of responses for pass@k. None: 1 and `evaluate.samples_per_prompt`.
        labels: A name for each model. None: the name of its folder or its run.
        resume: Keep existing responses.

    Raises:
        UserError: For mistakes in the recipe, the data or the models.
        RunError: If generation fails.

    Examples:
        >>> from rlhfless_ray import GenerationRecipe, evaluate
        >>> evaluate(GenerationRecipe.of({"prompts": {"task": "chain"}}), ["my-model"])
        Traceback (most recent call last):
        ...
        rlhfless_ray.common.errors.UserError: reward: an evaluation needs one; set reward.function, reward.url or reward.model_path
    """
    GenerationRecipe.check_type(recipe)
    if isinstance(models, str | Path) or isinstance(data, str):
        raise UserError("models and data: expected lists, such as ['my-model'], not one text")
    root = _check(recipe, ks, resume)
    models, data = [given_path(model, "--model") for model in models], [str(given_path(one, "--data")) for one in data]
    recipes = {
        label: _for_model(recipe, find_model(model, "--model", root / "models"), root, label)
        for label, model in zip(labels or _labels(models), models, strict=True)
    }
    loaded = {label: _load(of_model, data) for label, of_model in recipes.items()}  # before Ray starts, which takes longer
    _check_same_rows({label: prompts for label, (prompts, *_) in loaded.items()})
    ks = ks or sorted({1, recipe.evaluate.samples_per_prompt})
    scores: list[ModelScore] = []
    costs: dict[str, dict[str, float]] = {}
    first: dict[str, np.ndarray] = {}  # data set → mean reward of each prompt, of the first model
    about = tuple(_notes(recipe, data))
    with RayCluster.shared(recipe, max(parameter_count(initial_policy(of_model)[0]) for of_model in recipes.values())):
        for label, of_model in recipes.items():
            STOP.check()
            prompts, parts, notes = loaded[label]
            groups = _generate(of_model, prompts, about + notes, root / label)
            about = ()  # said once
            for name, part in parts.items():
                score, means = _score(label, name, groups[part], ks, first.get(name))
                first.setdefault(name, means)
                scores.append(score)
            costs[label] = _costs(root / label)
    evaluation = Evaluation(scores, costs)
    replace_file(root / FILE, evaluation.to_json().encode())
    return evaluation


def _check(recipe: GenerationRecipe, ks: Sequence[int], resume: bool) -> Path:
    """Return the evaluation's folder. Raises UserError if there can be none with these settings."""
    count = recipe.evaluate.samples_per_prompt
    if not recipe.scores:
        raise UserError("reward: an evaluation needs one; set reward.function, reward.url or reward.model_path")
    if bad := [k for k in ks if not 1 <= k <= count]:
        raise UserError(f"--k: {bad[0]} of {count} responses; set evaluate.samples_per_prompt to it, or lower it")
    root = Path(recipe.run.root) / recipe.run.name
    if root.is_dir() and not resume:
        raise UserError(f"{root} exists already; continue it with --resume, or set another run.name")
    RunFolder.check_root(recipe)
    return root


def _notes(recipe: GenerationRecipe, data: Sequence[str]) -> Iterator[str]:
    """Yield messages about settings that section `evaluate` decides, or that the data sets `data` replace."""
    section, rollout = recipe.evaluate, recipe.rollout
    if data:
        yield from sentences(recipe, ["evaluate.path", "evaluate.prompts"], "--data names the data sets")
    if rollout.samples_per_prompt != section.samples_per_prompt:
        yield from sentences(recipe, ["rollout.samples_per_prompt"], f"evaluate.samples_per_prompt is {section.samples_per_prompt}")
    if section.temperature is not None and rollout.temperature != section.temperature:
        yield from sentences(recipe, ["rollout.temperature"], f"evaluate.temperature is {section.temperature:g}")


def _check_same_rows(prompts: dict[str, list[Prompt]]) -> None:
    """Raise UserError if the models would answer other rows, because a model's tokenizer decides which prompts are too long."""
    of_models = ((label, [repr(prompt.row) for prompt in part]) for label, part in prompts.items())  # a NaN is not equal to itself
    (first, rows), *others = of_models
    for label, other in others:
        if other != rows:
            raise UserError(
                f"prompts.max_prompt_tokens: {first} answers {len(rows)} prompts and {label} answers {len(other)}, because their "
                "tokenizers leave out others as too long, so the models cannot be compared; raise it, or leave out rows yourself"
            )


def _generate(recipe: GenerationRecipe, prompts: list[Prompt], notes: tuple[str, ...], folder: Path) -> list[list[JsonObject]]:
    """Generate a model's missing responses, and return the rows of all of them by prompt."""
    with Generation(recipe, prompts=prompts, notes=notes, resume=(folder / RECORD).is_file()) as run:
        for _ in run:
            pass
    return list(read_groups(folder / RESPONSES))


def _labels(models: Sequence[str | Path]) -> list[str]:
    """Return a short unique name for each model: that of its folder, or of its run."""
    labels: list[str] = []
    for model in models:
        path = Path(model)
        name = re.sub(r"[^\w.-]+", "-", path.parent.name if path.name == "model" and path.parent.name else path.name).strip("-.") or "model"
        names = (name, *(f"{name}-{number}" for number in range(2, len(labels) + 2)))
        labels.append(next(label for label in names if label not in labels))
    return labels


def _for_model(recipe: GenerationRecipe, folder: Path, root: Path, label: str) -> GenerationRecipe:
    """Return the recipe of one model's run, with the sampling of section `evaluate`."""
    evaluate = recipe.evaluate
    temperature = recipe.rollout.temperature if evaluate.temperature is None else evaluate.temperature
    return recipe.with_settings(
        {
            "policy.path": str(folder),
            "run.root": str(root),
            "run.name": label,
            "rollout.samples_per_prompt": evaluate.samples_per_prompt,
            "rollout.temperature": temperature,
        }
    )


def _load(recipe: GenerationRecipe, data: Sequence[str]) -> tuple[list[Prompt], dict[str, slice], tuple[str, ...]]:
    """Return the prompts of all data sets, the part of each, and messages for the user about rows that were left out or cut."""
    files = initial_policy(recipe)[0]
    tokenizer, longest = policy_tokenizer(recipe, files), context_tokens(files)
    if not data:
        loaded = load_prompts(recipe, tokenizer, longest, files)
        data_sets, notes = {recipe.prompts.task or "held-out": loaded.heldout}, loaded.notes
    else:
        data_sets, notes = {}, ()
        for name in data:
            prompts: JsonObject = {"prompts.task": "", "prompts.path": name, "prompts.paths": [], "prompts.probabilities": None}
            one = recipe.with_settings({**prompts, "evaluate.prompts": 0, "evaluate.path": ""})
            loaded = load_prompts(one, tokenizer, longest, files)
            data_sets[name if name not in data_sets else f"{name}-{len(data_sets)}"] = loaded.train
            notes += tuple(f"{name}: {note}" for note in loaded.notes)
    every, parts = list[Prompt](), dict[str, slice]()
    for name, part in data_sets.items():
        parts[name] = slice(len(every), len(every) + len(part))
        every += [replace(prompt, index=len(every) + number) for number, prompt in enumerate(part)]
    if not every:
        raise UserError("evaluate.prompts: there are no held-out prompts; raise it, or name a data set with --data")
    return every, parts, notes


def _score(
    label: str, name: str, groups: list[list[JsonObject]], ks: Sequence[int], first: np.ndarray | None
) -> tuple[ModelScore, np.ndarray]:
    """Return a model's score on a data set, and the mean reward of each prompt, NaN where no response has one."""
    rewards = [np.array([row["reward"] for row in group if row["reward"] is not None], float) for group in groups]
    means = np.array([r.mean() if len(r) else np.nan for r in rewards])
    rows = [row for group in groups for row in group]
    differences = means - (means if first is None else first)
    pass_at = {k: _mean(np.array([best_of_k(r, k) for r in rewards if len(r) >= k]))[0] for k in ks}
    counted = len(groups), len(groups[0])
    lengths = float(np.mean([len(row["token_ids"]) for row in rows])), float(np.mean([row["finish"] == "length" for row in rows]))
    unscored = sum(row["reward"] is None for row in rows)
    return ModelScore(label, name, *counted, *_mean(means), pass_at, *_mean(differences), *lengths, unscored), means


def best_of_k(rewards: np.ndarray, k: int) -> float:
    """Return the expected highest reward of `k` of these responses, drawn without replacement.

    For rewards of 0 and 1 this is the unbiased estimate of pass@k: 1 - C(wrong, k) / C(n, k).
    """
    n = len(rewards)
    return float(sum(reward * math.comb(rank, k - 1) for rank, reward in enumerate(np.sort(rewards))) / math.comb(n, k))


def _mean(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard error without NaN."""
    known = values[np.isfinite(values)]
    if not len(known):
        return math.nan, math.nan
    return float(known.mean()), float(known.std(ddof=1) / math.sqrt(len(known))) if len(known) > 1 else 0.0


def _costs(folder: Path) -> dict[str, float]:
    """Return the costs of a run's responses, including those before a resume."""
    rows = RunRecord.read(folder).metrics
    last = rows[-1] if rows else {}
    tokens, seconds = (sum(row.get(name, 0.0) for row in rows) for name in ("tokens/generated", "step_s"))
    return {
        "slot_s": last.get("cost/total_full_slot_s", 0.0),
        "money": last.get("cost/total_money", 0.0),
        "tokens_per_s": tokens / seconds if seconds else 0.0,
    }
