"""Metrics under OpenRLHF's names: what its users' dashboards and log parsers look for."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlhfless_ray.learn.compute_advantages import penalized
from rlhfless_ray.learn.update_stats import merged
from rlhfless_ray.recipe import Recipe, WatchConfig
from rlhfless_ray.report.metrics import Metrics
from rlhfless_ray.report.openrlhf_names import NAMES, SAMPLE, Shown, renamed, step_line
from rlhfless_ray.report.sinks import MAX_SAMPLES, WandbRun
from rlhfless_ray.run.recorder import RunRecorder, _shown
from rlhfless_ray.types import Completion, CriticStats, Prompt, SampleId, Trained, UpdateStats

ROW = {
    "step": 7,
    "step_s": 3.0,
    "learn/policy_loss": 0.5,
    "learn/kl": 0.1,
    "learn/next_learning_rate": 1e-6,
    "learn/last_grad_norm": 2.0,
    "learn/ppo_kl": 0.01,
    "learn/sampler_kl": 0.02,
    "learn/reference_gap": 0.03,
    "reward/return_mean": 0.04,
    "learn/clip_share": 0.01,
    "reward/mean": 0.5,
    "reward/penalized_mean": 0.25,
    "reward/penalized_std": 0.5,
    "length/full_share": 0.0625,
    "length/mean": 9.0,
    "length/total_mean": 12.0,
    "length/truncated_share": 0.125,
    "tokens/samples": 64,
    "phase/prefill_s": 0.25,
    "phase/rollout_s": 1.0,
    "phase/score_s": 0.5,
    "phase/learn_s": 1.25,
    "phase/passes_s": 0.5,
    "phase/publish_s": 0.125,
    "phase/eval_s": 4.0,
    "reward/logs/format": 0.75,
    "plan/actors": 2,
    "eval/length_mean": 8.0,
    "eval/gsm8k/pass1": 0.5,
    "eval/gsm8k/pass4": 0.75,
    "eval/gsm8k/length_mean": 8.0,
    "eval/accuracy_sampled": 0.5,
}


def test_names_under_train_and_eval() -> None:
    found = renamed(ROW)
    assert found["train/global_step"] == found["eval/global_step"] == 7
    assert found["train/reward"] == found["train/rollout/reward_mean"] == 0.25
    timing = {name.removeprefix("train/timing/"): value for name, value in found.items() if name.startswith("train/timing/")}
    assert timing == {"generation": 1.25, "make_experience": 1.0, "ppo_train": 0.75, "broadcast": 0.125, "step_total": 3.125}
    assert found["train/response_clip_ratio"] == 0.0625 and found["train/truncated"] == found["train/rollout/truncated_rate"] == 0.125
    assert found["train/format"] == 0.75 and found["plan/actors"] == 2
    assert found["eval/eval_gsm8k_pass1"] == 0.5 and found["eval/eval_gsm8k_pass4"] == 0.75
    assert found["eval/eval_gsm8k_response_length_mean"] == 8.0 and found["eval/eval_response_length_mean"] == 8.0
    always = {
        "policy_loss",
        "actor_lr",
        "actor_grad_norm",
        "ppo_clip_ratio",
        "ppo_kl",
        "reward",
        "return",
        "kl",
        "logprobs_diff",
        "response_length",
        "total_length",
        "truncated",
        "response_clip_ratio",
    }
    assert {f"train/{name}" for name in always} <= found.keys() and found["train/vllm_kl"] == 0.02
    new = [name for names in NAMES.values() for name in names]
    assert len(new) == len(set(new))


def test_supervised_stages_have_the_names_of_their_launchers() -> None:
    row = {"step": 3, "learn/loss": 0.5, "learn/accuracy": 0.75, "learn/rejected_reward": -1.0, "eval/loss": 0.25, "eval/accuracy": 1.0}
    row |= {"learn/chosen_reward": 2.0, "eval/chosen_reward": 3.0, "eval/rejected_reward": -2.0}
    found = renamed({**row, "learn/learning_rate": 0.2, "learn/next_learning_rate": 0.1})
    assert found["train/lr"] == 0.1, "OpenRLHF logs it after the scheduler's step"
    assert found["train/global_step"] == found["eval/global_step"] == 3 and found["train/loss_mean"] == 0.5
    assert (found["train/acc_mean"], found["train/reject_reward"], found["eval/eval_loss"], found["eval/acc_mean"]) == (
        0.75,
        -1.0,
        0.25,
        1.0,
    )
    assert (found["train/chosen_reward"], found["eval/chosen_reward"], found["eval/reject_reward"]) == (2.0, 3.0, -2.0)
    assert renamed({"step": 3, "eval/loss": 0.25})["eval/eval gpt_loss"] == 0.25
    of_prm = renamed({"step": 3, "learn/accuracy": 0.5, "eval/loss": 0.25, "eval/accuracy": 1.0})
    assert (of_prm["eval/eval prm_loss"], of_prm["eval/eval acc"]) == (0.25, 1.0) and "eval/acc_mean" not in of_prm
    parts = {"loss": 0.7, "nll": 0.5, "distillation": 0.9}
    of_kd = renamed({"step": 3, **{f"{phase}/{name}": value for phase in ("learn", "eval") for name, value in parts.items()}})
    assert of_kd["train/loss_mean"] == of_kd["train/gpt_loss"] == of_kd["eval/eval gpt_loss"] == 0.5
    assert of_kd["train/distil_loss"] == 0.9 and of_kd["learn/loss"] == 0.7
    of_dpo = {
        "learn/loss": 0.7,
        "learn/preference_loss": 0.5,
        "learn/nll": 2.0,
        "eval/loss": 0.6,
        "eval/preference_loss": 0.4,
        "eval/accuracy": 1,
    }
    found = renamed({"step": 3, **of_dpo})
    assert (found["train/loss_mean"], found["train/nll_loss"], found["eval/eval_loss"], found["learn/loss"]) == (0.5, 2.0, 0.4, 0.7)
    assert "learn/loss" in renamed({"step": 3, "learn/loss": 0.5, "learn/policy_loss": 0.5})


def test_what_is_renamed_of_updates_is_what_updates_tell() -> None:
    told = {f"learn/{field.name}" for field in fields(UpdateStats)} | {f"critic/{field.name}" for field in fields(CriticStats)}
    assert {name for name in NAMES if name.startswith(("learn/", "critic/"))} <= told
    found = renamed({"step": 1, **dict.fromkeys(told, 0.5)})
    assert {"critic_loss", "values", "critic_lr", "critic_grad_norm"} <= {name.removeprefix("train/") for name in found}


def test_the_line_of_a_step_reads_back() -> None:
    match = re.fullmatch(r"Global step (\d+): (\{.*\})", step_line(ROW))
    assert match is not None and match[1] == "7"
    found = ast.literal_eval(match[2])
    assert found["policy_loss"] == 0.5 and found["rollout/num_samples"] == 64 and "eval_gsm8k_pass1" not in found


def test_sinks_get_other_names_and_the_file_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    watch = WatchConfig(wandb="off", metric_names="openrlhf", every_steps=2, run_name="mine", tensorboard_path=str(tmp_path / "tb"))
    with Metrics(tmp_path, watch, say=said.append) as metrics:
        got: list[dict] = []
        own: list[dict] = []
        for label, rows in (("TensorBoard", got), ("Prometheus", own)):
            metrics._sinks[label] = SimpleNamespace(write=rows.append, close=lambda: None)
        for step in (1, 2, 3):
            row = {"step": step, "learn/policy_loss": 0.5, **({"eval/samples": 4.0} if step == 3 else {})}
            metrics.copy(metrics.keep(row, Shown(f"2+{step}=", 0.5)))
    assert [row["step"] for row in got] == [row["step"] for row in own] == [2, 3]
    assert own[0]["learn/policy_loss"] == 0.5 and own[1] == {"step": 3, "eval/samples": 4.0}, "the dashboard asks for these names"
    assert got[0][SAMPLE] == ("2+2=", 0.5) and SAMPLE not in got[1]
    assert got[0]["train/policy_loss"] == 0.5 and "train/policy_loss" not in got[1] and got[1]["eval/eval_num_samples"] == 4.0
    assert [line.split(":")[0] for line in said] == ["Global step 1", "Global step 2", "Global step 3"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["learn/policy_loss"] == 0.5 for row in rows)
    assert list((tmp_path / "tb" / "mine").iterdir())  # TensorBoard's own file


def test_a_sample_of_each_step_is_a_text_in_tensorboard(tmp_path: Path) -> None:
    """Under the tag and in the form that torch's writer gives such a text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Metrics(tmp_path, WatchConfig(wandb="off", metric_names="openrlhf"), say=lambda _: None) as metrics:
        metrics.copy(metrics.keep({"step": 4, "learn/policy_loss": 0.5}, Shown("1+1=2", 1.0)))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (found,) = events.Tensors("train/generated_samples/text_summary")
    assert (found.step, found.tensor_proto.string_val) == (4, [b"Sample:\n1+1=2\n\nReward: 1.0000"])
    assert events.SummaryMetadata("train/generated_samples/text_summary").plugin_data.plugin_name == "text"


def test_samples_are_a_growing_table_in_wandb() -> None:
    logged: list[dict] = []
    run = WandbRun.__new__(WandbRun)
    run._run, run._samples = SimpleNamespace(log=logged.append), []
    run._wandb = SimpleNamespace(Table=lambda columns, data: (columns, list(data)))
    for step in (1, 2):
        run.write({"step": step, "train/reward": 0.5, SAMPLE: Shown(f"text {step}", float(step))})
    columns, rows = logged[1][SAMPLE]
    assert columns == ["global_step", "text", "reward"] and rows == [(1, "text 1", 1.0), (2, "text 2", 2.0)]
    assert logged[0] == {"step": 1, "train/reward": 0.5, SAMPLE: (columns, rows[:1])}
    for step in range(3, MAX_SAMPLES + 11):
        run.write({"step": step, SAMPLE: Shown("text", 0.0)})
    assert [step for step, *_ in logged[-1][SAMPLE][1]] == list(range(11, MAX_SAMPLES + 11)), "the newest"


def test_what_a_reward_function_logs_is_averaged_over_the_samples_that_have_it() -> None:
    def sample(place: int, reward: float | None, **logs: float) -> Trained:
        done = Completion(8 * place, np.zeros(4, np.int32), np.zeros(4, np.float32), "stop", 0)
        of_update = {"earned": reward and reward - 0.5, "penalized": reward}
        return Trained(Prompt(0, "p", (1, 2)), SampleId(place, 1, 0), done, reward=reward, score=reward, extra_logs=logs, **of_update)

    record = RunRecorder.__new__(RunRecorder)
    record.recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
    samples = [sample(0, 1.0, a=2.0), sample(0, 0.0), sample(1, 0.5, a=4.0), sample(1, None, a=9.0)]
    found = record.summarize_samples(samples)
    assert found["reward/logs/a"] == 3.0 and found["reward/score_mean"] == 0.5 and found["length/total_mean"] == 6.0
    assert found["reward/penalized_mean"] == found["reward/mean"] == 0.5 and found["reward/penalized_std"] == found["reward/std"]
    assert found["reward/return_mean"] == pytest.approx(np.mean([0.5, 0.0, 0.0])) and found["reward/std"] == np.std([1, 0, 0.5], ddof=1)
    assert _shown(samples[-1:]) is None and _shown(samples[::-1]) == ("p", 0.5)
    assert found["reward/group_std"] == np.mean([np.std([1.0, 0.0], ddof=1), 0.0]) and found["tokens/samples"] == 4


def test_rewards_and_lengths_are_those_of_openrlhf_with_length_penalties() -> None:
    """Recorded from `length_penalty.apply_length_penalties`, `_compute_rollout_stats` and the formulas of `samples_generator` and
    `experience_maker` in OpenRLHF 0.11.2: --data.max_len 23, --rollout.max_new_tokens 16, groups of 3."""
    recipe = Recipe.parse(
        {
            "prompts": {"task": "chain", "max_prompt_tokens": 7},
            "rollout": {"max_tokens": 16, "samples_per_prompt": 3},
            "reward": {"function": "task", "overlong_buffer_tokens": 8, "overlong_penalty": 0.5, "stop_properly_penalty": 0.5},
        }
    )
    lengths, rewards = np.array([3, 12, 16, 16, 9, 13]), np.array([1.0, 0.5, 0.25, 1.0, -0.5, 1.0])
    truncated = np.array([0, 0, 1, 1, 0, 0], bool)
    after = penalized(recipe.reward, rewards.reshape(2, 3), lengths, truncated, 16).ravel()
    assert after.tolist() == [1.0, 0.25, -0.125, 0.25, -0.5625, 0.6875]
    samples = []
    for i in range(6):
        done = Completion(i, np.zeros(lengths[i], np.int32), np.zeros(lengths[i], np.float32), "length" if truncated[i] else "stop", 0)
        prompt = Prompt(i // 3, "p", (1,) * (4 if i < 3 else 7))
        samples.append(Trained(prompt, SampleId(prompt.index, 1, i % 3), done, reward=float(rewards[i]), penalized=float(after[i])))
    record = RunRecorder.__new__(RunRecorder)
    record.recipe = recipe
    found = renamed({"step": 1, "learn/policy_loss": 0.0, **record.summarize_samples(samples)})
    assert found["train/reward"] == found["train/rollout/reward_mean"] == pytest.approx(0.25)
    assert found["train/rollout/reward_std"] == pytest.approx(0.557617723941803, rel=1e-6)
    assert found["train/group_reward_std"] == pytest.approx(0.6035638451576233, rel=1e-6)
    assert found["train/response_clip_ratio"] == pytest.approx(1 / 6) and found["train/truncated"] == pytest.approx(1 / 3)
    assert found["reward/mean"] == pytest.approx(rewards.mean()), "ours stays that of the reward function"
    assert _shown(samples[1:]) == ("p", 0.25)
    together = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "rollout": {"max_tokens": 19, "max_total_tokens": 20}}
    record.recipe = Recipe.parse(together)
    assert record.summarize_samples(samples)["length/full_share"] == 0.5
    record.recipe = Recipe.parse({"prompts": {"task": "chain"}, "agent": {"path": "agent.py", "max_tokens": 16}})
    assert record.summarize_samples(samples)["length/full_share"] == pytest.approx(5 / 6)


def test_of_several_optimizer_steps_the_rate_to_come_and_the_last_norm_are_told() -> None:
    steps = [
        UpdateStats(learning_rate=rate, next_learning_rate=rate / 2, last_grad_norm=norm, grad_norm=norm)
        for rate, norm in ((8.0, 1.0), (4.0, 3.0), (2.0, 2.0))
    ]
    found = merged(steps)
    assert (found.next_learning_rate, found.last_grad_norm) == (1.0, 2.0)
    assert (found.learning_rate, found.grad_norm) == (pytest.approx(14 / 3), 2.0)
