"""The comparisons with OpenRLHF and with TRL's supervised trainers, without running either."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.core_seconds import CoreSeconds
from benchmarks.common.run_process import MeasuredProcess
from benchmarks.peers.openrlhf_port import CHANGES, port
from benchmarks.supervised import SIZES, check_same_work
from benchmarks.vs_openrlhf import CASES, LETTERS, OPENRLHF, OURS, SystemRun, Work, flags, targets, write_rewards
from rlhfless_ray.agent.load_agent import AgentSource
from rlhfless_ray.compat.openrlhf.translate import translate


@pytest.mark.parametrize("case", CASES)
def test_this_launcher_reads_each_command_as_0_11_2(case: str, tmp_path: Path) -> None:
    found = translate(flags(case, Work(tmp_path, 1, 32, 8, 160, 192, 3e-4, 8, True), tmp_path / "out", 3), {})
    recipe = found.recipe()
    assert not found.refused and found.line.version == "0.11.2"
    assert recipe.run.seed == 3 and recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt == 256
    assert recipe.learner.learning_rate == 3e-4 and recipe.algorithm.advantage.estimator == ("gae" if case == "ppo" else "group_norm")


def test_reward_and_agent_file_score_a_response_without_its_end(tmp_path: Path) -> None:
    write_rewards(tmp_path, LETTERS, "<eos>", 0.5)
    found = runpy.run_path(str(tmp_path / "reward.py"))["reward_func"](["ask:aZ<eos>", "ask:ZZZm"], ["ask:", "ask:"], ["0", "0"])
    assert found["rewards"].tolist() == [0.5, 0.25]
    agent = AgentSource.load(str(tmp_path / "agent.py")).file.module().AgentInstance()
    state = {"observation_text": "ask:", "label": "0", "sampling_params": None}
    turns = [asyncio.run(agent.step({**state, "action_text": text})) for text in ("ZZZm<eos>", "ZZZm")]
    assert [(turn["rewards"].item(), turn["done"], turn["environment_feedback"]) for turn in turns] == [
        (0.25, False, ";ask:"),
        (0.125, True, ""),
    ]


def test_only_the_version_that_the_changes_are_for_is_changed(tmp_path: Path) -> None:
    for name, changes in CHANGES.items():
        file = tmp_path / "openrlhf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(old + "\n" for old, _ in changes))
    port(tmp_path)
    text = (tmp_path / "openrlhf" / "trainer/ray/ppo_actor.py").read_text()
    assert text == "broadcast(param.data, src=0)\n" and (tmp_path / "flash_attn" / "bert_padding.py").exists()
    with pytest.raises(RuntimeError, match="0 times, not once"):
        port(tmp_path)


def test_ratios_are_of_steady_steps_of_all_seeds() -> None:
    def run(system: str, seconds: float, accuracy: float) -> SystemRun:
        steps = [{"step_s": 50.0, "core_s": 90.0, "reward": 0.1}] * 2 + [{"step_s": seconds, "core_s": seconds, "reward": 0.5}] * 4
        return SystemRun(system, 0, 60.0, steps, 1000.0, 3, 100.0, accuracy)

    found = targets([run(OPENRLHF, 3.0, 0.9), run(OURS, 1.5, 0.95)])
    assert [target.value for target in found] == pytest.approx([0.5, 0.5, 1.0, 5.0])
    assert [target.met for target in found] == [True, True, True, False]


def test_steps_of_other_tokens_or_losses_are_not_compared() -> None:
    def one(tokens: float, loss: float) -> MeasuredProcess:
        return MeasuredProcess("x", [{"step_s": 1.0, "tokens": tokens, "loss": loss}], 1.0, 1.0, 1, 1.0)

    check_same_work(SIZES["11M"], one(100, 2.0), one(100, 2.001))
    for other in (one(101, 2.0), one(100, 2.1)):
        with pytest.raises(RuntimeError, match="not the same work"):
            check_same_work(SIZES["11M"], one(100, 2.0), other)


@pytest.mark.slow
def test_core_seconds_of_a_child_count() -> None:
    child = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass\ntime.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"])
    used = CoreSeconds(parent.pid)
    try:
        deadline = time.monotonic() + 60
        while not used.used or used.used[-1] < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            used.sample()
        assert used.between(used.times[0], used.times[-1]) <= used.used[-1] < 5
    finally:
        for pid in used.members():
            subprocess.run(["kill", str(pid)], check=False)
        parent.wait()
