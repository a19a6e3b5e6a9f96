"""Supervised stages on the quickstart's task, and what held-out prompts say of their models."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import Target
from benchmarks.common.run_metadata import ROOT
from rlhfless_ray import GenerationRecipe, RunView, SupervisedRecipe, evaluate, generate, run_supervised
from rlhfless_ray.run.responses import preference_pairs, write_rows

ONLINE_DPO = "online_dpo"
STAGES = ("sft", "rm", "dpo", "kto", "kd", ONLINE_DPO)
ROUNDS = 2  # of online DPO
LEAST_POINTS = 10.0  # that held-out accuracy has to rise by preferences
BELOW_POINTS = 3.0  # that a policy from scratch may stay below the one that it is compared with: two standard errors
LEAST_PAIRS = 95.0  # percent of held-out pairs that a reward model is to tell
RECIPES = {"sft": "sft.yaml", "rm": "reward_model.yaml", "dpo": "dpo.yaml", "kto": "dpo.yaml", "kd": "sft.yaml", ONLINE_DPO: "dpo.yaml"}
SETTINGS: dict[str, tuple[str, ...]] = {
    "kto": ("task=kto", "data.rows=4096"),
    # a policy of half the width learns from the quickstart's policy in half as many steps
    "kd": ("task=kd", "policy.hidden_size=64", "data.rows=32000", "loss.teacher_weight=0.5"),
}
EVALUATION = {"evaluate": {"prompts": 256, "samples_per_prompt": 4}, "rollout": {"max_tokens": 160}}


@dataclass(frozen=True)
class StageResult:
    """Accuracies are the verifier's, 0 to 1, of sampled responses to held-out prompts; `start` is the quickstart's warm-started policy."""

    stage: str
    steps: int
    first_loss: float
    last_loss: float
    start: float | None = None
    accuracy: float | None = None
    pairs_told: float | None = None  # share of held-out pairs whose right response has the higher reward

    def target(self) -> Target:
        if self.pairs_told is not None:
            return Target(f"{self.stage}: held-out pairs told", 100 * self.pairs_told, least=LEAST_PAIRS, unit=" %")
        assert self.accuracy is not None and self.start is not None
        points = 100 * (self.accuracy - self.start)
        if self.stage in ("sft", "kd"):
            return Target(f"{self.stage}: held-out accuracy, less the warm start's", points, least=-BELOW_POINTS, unit=" points")
        return Target(f"{self.stage}: rise of held-out accuracy, sampled", points, least=LEAST_POINTS, unit=" points")

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        told = "" if self.pairs_told is None else f"{100 * self.pairs_told:.1f}"
        accuracy = "" if self.accuracy is None or self.start is None else f"{100 * self.accuracy:.1f} ({100 * self.start:.1f})"
        return self.stage, str(self.steps), f"{self.first_loss:.3f} → {self.last_loss:.3f}", accuracy, told


def train_stages(stages: list[str], start: Path, root: Path, quick: bool) -> list[StageResult]:
    """Train each stage, then judge all policies side by side. `start`: folder of the quickstart's warm-started policy."""
    policies: dict[str, Path] = {"start": start}
    losses: dict[str, tuple[int, float, float]] = {}
    told: dict[str, float] = {}
    for stage in stages:
        began_s = time.monotonic()
        folders = online_rounds(start, root, quick) if stage == ONLINE_DPO else [trained(recipe(stage, start, root, quick))]
        folder, rows = folders[-1], [row for one in folders for row in RunView.read(one).metrics]
        found = [row["learn/loss"] for row in rows if "learn/loss" in row]
        edge = max(1, len(found) // 10)
        losses[stage] = len(found), sum(found[:edge]) / edge, sum(found[-edge:]) / edge
        if stage == "rm":
            told[stage] = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1]
        else:
            policies[stage] = folder / "model"
        print(f"{stage}: {time.monotonic() - began_s:.0f} s, {json.dumps(rows[-1])}", flush=True)
    accuracy: dict[str, float] = {}
    if len(policies) > 1:
        section: Any = {"evaluate": {"prompts": 16, "samples_per_prompt": 1}} if quick else {}
        judged = GenerationRecipe.of({**verified(root, "judged"), **EVALUATION, **section})
        scores = evaluate(judged, list(policies.values()), labels=list(policies)).scores
        accuracy = {score.model: score.mean for score in scores}
    return [
        StageResult(stage, *losses[stage], *((None, None, told[stage]) if stage in told else (accuracy["start"], accuracy[stage])))
        for stage in stages
    ]


def trained(stage: SupervisedRecipe) -> Path:
    return run_supervised(stage).path


def verified(root: Path, name: str) -> dict[str, Any]:
    """Return sections of a recipe whose responses the task's verifier judges."""
    return {
        "prompts": {"task": "chain"},
        "reward": {"function": "task"},
        "run": {"root": str(root), "name": name},
        "watch": {"progress": "plain", "tensorboard": False, "wandb": "off"},
    }


def online_rounds(start: Path, root: Path, quick: bool) -> list[Path]:
    """Train rounds of online DPO and return their run folders.

    In each round the newest policy answers prompts eight times, and the verifier's best and worst answer to each are a pair.
    """
    folders: list[Path] = []
    for number in range(1, ROUNDS + 1):
        policy = folders[-1] / "model" if folders else start
        sections = verified(root, f"responses-{number}")
        answered = {
            **sections,
            "policy": {"path": str(policy)},
            "prompts": {"task": "chain", "rows": 32 if quick else 1024, "batch_prompts": 512},
            "rollout": {"samples_per_prompt": 8, "max_tokens": 160},
            "run": {**sections["run"], "seed": 20 + number},
        }
        pairs = root / f"pairs-{number}.jsonl"
        write_rows(pairs, preference_pairs(generate(GenerationRecipe.of(answered))))
        own = [f"data.path={pairs}", "data.task=", f"run.name={ONLINE_DPO}-{number}", "evaluate.rows=4" if quick else "evaluate.rows=64"]
        folders.append(trained(recipe(ONLINE_DPO, policy, root, quick, own)))
    return folders


def recipe(stage: str, start: Path, root: Path, quick: bool, own: Sequence[str] = ()) -> SupervisedRecipe:
    """Return the stage's recipe, with `own` settings. `sft` and `kd` begin from scratch, all others with the policy in `start`."""
    begins = {"sft": "policy.hidden_size=128", "kd": f"teacher.path={start}"}.get(stage, f"policy.path={start}")
    overrides = [
        *SETTINGS.get(stage, ()),
        begins,
        f"run.root={root}",
        f"run.name={stage}",
        "watch.progress='plain'",
        "watch.tensorboard=false",
        "watch.wandb='off'",
        *(("run.steps=2", "data.rows=256", "evaluate.rows=32") if quick else ()),
        *own,
    ]
    return SupervisedRecipe.load(ROOT / "recipes" / RECIPES[stage], overrides)
