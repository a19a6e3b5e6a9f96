"""Rename a step's metrics to the names in OpenRLHF's logs.

Only metrics with the meaning of OpenRLHF 0.11.2 are renamed; the others keep their names. In that version rewards include length
penalties. `response_clip_ratio` is the share of samples whose prompt and response together reach `--data.max_len`. After several
optimizer steps `actor_grad_norm` is that of the last one. `actor_lr`, and `lr` of a supervised stage, is the rate of the next one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rlhfless_ray.common.data_files import read_data_file
from rlhfless_ray.common.json_types import JsonObject

SAMPLE = "train/generated_samples"


class Shown(NamedTuple):
    """A sample to show: a row of a table in Weights & Biases, a text in TensorBoard."""

    text: str  # prompt and response
    reward: float


_TABLES = read_data_file(__package__, "openrlhf_names.yaml")
NAMES: dict[str, list[str]] = _TABLES["run"]
OF_STAGE: dict[str, list[str]] = _TABLES["stage"]
OF_SOURCE: dict[str, str] = _TABLES["source"]


def renamed(row: JsonObject) -> JsonObject:
    """Return the row under OpenRLHF's names; other metrics keep their names."""
    values: JsonObject = {}
    of_stage = ("learn/loss" in row or "eval/loss" in row) and "learn/policy_loss" not in row
    others = {**OF_STAGE, **_loss_names(row)} if of_stage else {}
    for name, value in row.items():
        for new in others.get(name) or _names(name):
            values[new] = value
    if "learn/policy_loss" in row:
        values |= _timing(row)
    if any(name.startswith("eval/") for name in row):
        values["eval/global_step"] = row.get("step")
    return values


def _loss_names(row: JsonObject) -> dict[str, tuple[str, ...]]:
    """Return the names of a supervised stage's loss, and of the evaluations of launchers that have names of their own for them."""
    if {"learn/preference_loss", "eval/preference_loss"} & row.keys():  # train_dpo logs the part that compares responses
        return {
            "learn/preference_loss": ("train/loss_mean",),
            "learn/nll": ("train/nll_loss",),
            "eval/preference_loss": ("eval/eval_loss",),
        }
    if {"learn/distillation", "eval/distillation"} & row.keys():  # train_kd logs the likelihood as its loss
        return {"learn/nll": ("train/loss_mean", "train/gpt_loss"), "eval/nll": ("eval/eval gpt_loss",)}
    loss = {"learn/loss": ("train/loss_mean",)}
    if "eval/accuracy" not in row:
        return {**loss, "eval/loss": ("eval/eval gpt_loss",)}
    if {"eval/chosen_reward", "eval/rejected_reward"} & row.keys():
        return {**loss, "eval/loss": ("eval/eval_loss",)}
    return {**loss, "eval/loss": ("eval/eval prm_loss",), "eval/accuracy": ("eval/eval acc",)}


def _timing(row: JsonObject) -> dict[str, float]:
    """Return the seconds of a step's four parts, and their sum, which excludes evaluations and the like."""

    def seconds(*phases: str) -> float:
        return sum(row.get(f"phase/{phase}_s") or 0.0 for phase in phases)

    parts = {
        "generation": seconds("prefill", "rollout"),
        "make_experience": seconds("score", "passes"),
        "ppo_train": seconds("learn") - seconds("passes"),
        "broadcast": seconds("publish"),
    }
    return {f"train/timing/{name}": value for name, value in {**parts, "step_total": sum(parts.values())}.items()}


def step_line(row: JsonObject) -> str:
    """Format `Global step N: {…}`, as OpenRLHF logs every step."""
    shown = {
        name.removeprefix("train/"): value
        for name, value in renamed(row).items()
        if name.startswith("train/") and name != "train/global_step"
    }
    return f"Global step {row['step']}: {shown}"


def _names(name: str) -> Sequence[str]:
    if name in NAMES:
        return NAMES[name]
    if log := re.fullmatch(r"reward/logs/(.+)", name):
        return (f"train/{log[1]}",)
    if source := re.fullmatch(r"eval/(.+)/(pass\d+|length_mean|truncated_share)", name):
        return (f"eval/eval_{source[1]}_{OF_SOURCE.get(source[2], source[2])}",)
    return (name,)
