"""A step's metrics under the names that OpenRLHF logs them by. Only values of the same meaning are renamed; what it does not log
keeps its name.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

SAMPLE = "train/generated_samples"


class Shown(NamedTuple):
    """A sample for whoever looks on: a table's row in Weights & Biases, a text in TensorBoard."""

    text: str  # prompt and response
    reward: float


NAMES: dict[str, tuple[str, ...]] = {
    "step": ("train/global_step",),
    "learn/policy_loss": ("train/policy_loss",),
    "learn/kl": ("train/kl",),
    "learn/ppo_kl": ("train/ppo_kl",),
    "learn/sampler_kl": ("train/vllm_kl",),
    "learn/reference_gap": ("train/logprobs_diff",),
    "learn/entropy": ("train/entropy_loss",),
    "learn/clip_share": ("train/ppo_clip_ratio",),
    "learn/importance_capped_share": ("train/is_filter_ratio",),
    "learn/grad_norm": ("train/actor_grad_norm",),
    "learn/learning_rate": ("train/actor_lr",),
    "critic/loss": ("train/critic_loss",),
    "critic/value_mean": ("train/values",),
    "critic/grad_norm": ("train/critic_grad_norm",),
    "critic/learning_rate": ("train/critic_lr",),
    "reward/mean": ("train/reward", "train/rollout/reward_mean"),
    "reward/std": ("train/rollout/reward_std",),
    "reward/score_mean": ("train/score",),
    "reward/return_mean": ("train/return",),
    "reward/group_std": ("train/group_reward_std",),
    "length/mean": ("train/response_length", "train/rollout/response_length_mean"),
    "length/total_mean": ("train/total_length",),
    "length/truncated_share": ("train/truncated", "train/response_clip_ratio", "train/rollout/truncated_rate"),
    "tokens/samples": ("train/rollout/num_samples",),
    "filter/pass_percent": ("train/dynamic_filtering_pass_rate",),
    "phase/rollout_s": ("train/timing/generation",),
    "phase/learn_s": ("train/timing/ppo_train",),
    "phase/publish_s": ("train/timing/broadcast",),
    "step_s": ("train/timing/step_total",),
    "eval/length_mean": ("eval/eval_response_length_mean",),
    "eval/truncated_share": ("eval/eval_truncated_rate",),
    "eval/samples": ("eval/eval_num_samples",),
}
OF_SOURCE = {"length_mean": "response_length_mean", "truncated_share": "truncated_rate"}
MADE_BEFORE_TRAINING = ("phase/rollout_s", "phase/prefill_s", "phase/score_s")  # timing/make_experience


def renamed(row: dict[str, Any]) -> dict[str, Any]:
    """The row under OpenRLHF's names, other metrics under ours."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        for new in _names(name):
            found[new] = value
    if "learn/policy_loss" in row:
        found["train/timing/make_experience"] = sum(row.get(name) or 0.0 for name in MADE_BEFORE_TRAINING)
    if any(name.startswith("eval/") for name in row):
        found["eval/global_step"] = row.get("step")
    return found


def step_line(row: dict[str, Any]) -> str:
    """`Global step N: {…}`, as OpenRLHF's log has it for every step."""
    shown = {
        name.removeprefix("train/"): value for name, value in renamed(row).items()
        if name.startswith("train/") and name != "train/global_step"
    }
    return f"Global step {row['step']}: {shown}"


def _names(name: str) -> tuple[str, ...]:
    if name in NAMES:
        return NAMES[name]
    if log := re.fullmatch(r"reward/logs/(.+)", name):
        return (f"train/{log[1]}",)
    if source := re.fullmatch(r"eval/(.+)/(pass\d+|length_mean|truncated_share)", name):
        return (f"eval/eval_{source[1]}_{OF_SOURCE.get(source[2], source[2])}",)
    return (name,)
