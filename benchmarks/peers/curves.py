"""Reward curves of TRL and this runtime beside each other, on the quickstart's task.

Same warm-started policy, prompts in the same order, loss and optimizer. They sample with different random numbers, so the
curves agree in trend, not in detail. This runtime goes twice, without drafted tokens and with `rollout.speculation: auto`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.charts import save_svg, sparkline, svg_pyplot
from benchmarks.common.results import Spread, result_folder
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import MeasuredProcess
from benchmarks.learns import warm_policy
from benchmarks.peers.run_ours import run_ours
from benchmarks.peers.run_trl import run_trl
from rlhfless_ray import Recipe
from rlhfless_ray.weights.model_folder import write_folder

RECIPE = ROOT / "recipes" / "quickstart.yaml"
PROMPTS = 16  # per step: fewer than the quickstart's, so that TRL's steps stay short
LAST = 10  # steps that the reached reward is averaged over
OURS, DRAFTING = "rlhfless_ray", "rlhfless_ray, speculation auto"
SHOWN = ("trl", OURS, DRAFTING)


def measure_curves(steps: int, threads: int, scratch: Path, console: Console, *, quick: bool) -> dict[str, Any]:
    here = scratch / "curves"
    here.mkdir(parents=True)
    overrides = [
        f"run.root={here / 'runs'}",
        f"run.steps={steps}",
        f"prompts.batch_prompts={PROMPTS}",
        "prompts.shuffle=false",
        "evaluate.prompts=0",
        "algorithm.updates_per_step=1",
        "algorithm.importance_cap=0",
        "algorithm.kl.coefficient=0",
        "objective.prefer=1",
        f"cluster.cpus={threads}",
        f"learner.max_slots_per_rank={threads}",
        "learner.ranks=1",
        f"rollout.max_actors={threads}",
        "checkpoint.every_steps=1000000",
        "watch.progress='off'",
        "watch.tensorboard=false",
        "watch.wandb='off'",
    ]
    if quick:
        overrides += ["warm_start.steps=20", "rollout.max_tokens=64"]
    plain = Recipe.load(RECIPE, overrides)
    policy = write_folder(here / "policy", warm_policy(plain))
    content = plain.model_dump(mode="json")
    content["policy"]["path"] = str(policy)
    runs = {}
    for name, speculation in ((OURS, "off"), (DRAFTING, "auto")):
        console.print(f"reward curves: rlhfless_ray, rollout.speculation={speculation}", highlight=False)
        content["rollout"]["speculation"] = speculation
        content["run"]["name"] = speculation
        runs[name] = run_ours(content, here)
    console.print("reward curves: TRL", highlight=False)
    runs["trl"] = run_trl(_settings(plain, policy, here, threads), here)
    found = {"recipe": RECIPE.name, "prompts_per_step": PROMPTS, "group": plain.rollout.samples_per_prompt, "steps": steps}
    for name, run in runs.items():
        found[name] = _curve(run, PROMPTS * plain.rollout.samples_per_prompt)
    _draw(found, f"Mean reward of a step, {plain.prompts.task} task, same policy and prompts", result_folder(quick) / "vs_trl_curves.svg")
    return found


def _draw(found: dict[str, Any], title: str, path: Path) -> None:
    figure, axis = svg_pyplot().subplots(figsize=(7.2, 3.4), layout="constrained")
    for name in SHOWN:
        axis.plot(found[name]["time_s"], found[name]["reward_mean"], label=name)
    axis.set(title=title, xlabel="seconds of training", ylabel="reward")
    axis.legend()
    save_svg(figure, path)


def _settings(recipe: Recipe, policy: Path, folder: Path, threads: int) -> dict[str, Any]:
    """The recipe in TRL's terms."""
    from rlhfless_ray.prompts.builtin_tasks import task

    rows = task(recipe.prompts.task).rows(recipe.prompts.rows, recipe.run.seed, "train")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = PROMPTS * recipe.rollout.samples_per_prompt
    learner, algorithm = recipe.learner, recipe.algorithm
    return {
        "policy": str(policy),
        "prompts": str(prompts),
        "reward": f"task:{recipe.prompts.task}",
        "columns": list(rows[0]),
        "prompts_per_step": PROMPTS,
        "group": recipe.rollout.samples_per_prompt,
        "max_tokens": recipe.rollout.max_tokens,
        "temperature": recipe.rollout.temperature,
        "learning_rate": learner.learning_rate,
        "micro_sequences": 64 if samples % 64 == 0 else samples,
        "steps": recipe.run.steps,
        "threads": threads,
        "seed": recipe.run.seed,
        "root": str(ROOT),
        "alike": True,
        "config": {
            "loss_type": "dapo" if algorithm.loss_mean == "token" else "grpo",
            "scale_rewards": "group" if algorithm.advantage.estimator == "group_norm" else "none",
            "epsilon": algorithm.clip_low,
            "epsilon_high": algorithm.clip_high,
            "weight_decay": learner.weight_decay,
            "adam_beta1": learner.betas[0],
            "adam_beta2": learner.betas[1],
            "max_grad_norm": learner.grad_clip,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": learner.warmup_steps,
        },
    }


def _curve(run: MeasuredProcess, samples: int) -> dict[str, Any]:
    rewards = [step["reward_mean"] for step in run.steps]
    return {
        "reward_mean": rewards,
        "time_s": list(np.cumsum([step["step_s"] for step in run.steps])),
        "step_s": Spread.of(step["step_s"] for step in run.steps[1:]),
        "samples_per_s": Spread.of(samples / step["step_s"] for step in run.steps[1:]),
        "generate_s": Spread.of(step["generate_s"] for step in run.steps[1:]),
        "first_mean": float(np.mean(rewards[:LAST])),
        "last_mean": float(np.mean(rewards[-LAST:])),
        "tokens": sum(step["tokens"] for step in run.steps),
    }


def show_curves(curves: dict[str, Any], console: Console) -> None:
    title = (
        f"Reward curves, natural response lengths: {curves['steps']} steps of {curves['prompts_per_step']} × "
        f"{curves['group']} samples, {curves['recipe']}"
    )
    table = Table(
        "", f"first {LAST}", f"last {LAST}", "reward by step", "step, s", "samples/s", "training, s", title=title, title_justify="left"
    )
    low = min(min(curves[name]["reward_mean"]) for name in SHOWN)
    high = max(max(curves[name]["reward_mean"]) for name in SHOWN)
    for name in SHOWN:
        curve = curves[name]
        table.add_row(
            name,
            f"{curve['first_mean']:.3f}",
            f"{curve['last_mean']:.3f}",
            sparkline(curve["reward_mean"], low, high),
            f"{curve['step_s'].median:.3g}",
            f"{curve['samples_per_s'].median:.3g}",
            f"{curve['time_s'][-1]:.4g}",
        )
    console.print(table)
