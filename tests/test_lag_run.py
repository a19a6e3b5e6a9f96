"""Runs whose next rollout overlaps this step's update: versions, log-probabilities, repetition and resume."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file

from benchmarks.common.call_hooks import call_before
from benchmarks.common.fault_injection import pid_of
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.functions.ledger import read_ledger
from rlhfless_ray.session.early_work import EarlyWork
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Sample
from tests.compat.test_runs import AGENT
from tests.conftest import command_here, samples, small_recipe, write_recipe
from tests.run_files import CheckpointPolicy, HookedRun, engines_in_step, rows, watched_phases

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]

LAG = {"rollout__max_lag_steps": 1, "rollout__stream_interval_s": 0.02, "checkpoint__every_steps": 1, "checkpoint__keep": 9}

Ran = tuple[Recipe, list[Step], Path]


@pytest.fixture(scope="module")
def lagging(private_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Recipe, steps and folder of an undisturbed run with a lag, which several tests look at."""
    folder = tmp_path_factory.mktemp("lagging")
    recipe = Recipe.parse(small_recipe(folder, **LAG))
    with Runtime(recipe) as run:
        return recipe, list(run), folder / "runs" / "small"


def test_each_tokens_log_probability_is_that_of_the_version_that_drew_it(lagging: Ran) -> None:
    """Checkpoints hold the weights of each version, under which every response is computed again. For a run without a lag see
    `test_run.py`."""
    recipe, steps, folder = lagging
    drawn_by = {step.number: {version for s in step.samples for version, _ in s.completion.versions} for step in steps}
    assert drawn_by == {1: {0}, 2: {0}, 3: {1}, 4: {2}}
    policy, told = CheckpointPolicy(recipe, folder), rows(folder, 1)

    def under(version: int, samples: list[Sample]) -> list[np.ndarray]:
        policy.load(version)
        return [policy.logprobs(sample) for sample in samples]

    for step, row in zip(steps, told, strict=True):
        (version,) = drawn_by[step.number]
        drawn = under(version, step.samples)
        for sample, found in zip(step.samples, drawn, strict=True):
            np.testing.assert_allclose(found, sample.completion.logprobs, atol=1e-4)
        if version < step.number - 1:
            change = np.concatenate(under(step.number - 1, step.samples)) - np.concatenate(drawn)
            assert row["lag/kl_1"] == pytest.approx(np.mean(np.exp(change) - 1 - change), rel=0.02) and "lag/kl_0" not in row
    assert [(row["lag/mean"], row["lag/max"]) for row in told] == [(0, 0), (1, 1), (1, 1), (1, 1)]
    shares = [row["learn/effective_share"] for row in told]
    assert shares[0] == pytest.approx(1, abs=1e-4) and 0 < shares[1] < 1 - 1e-5


def test_engines_and_learner_hold_slots_at_once_and_the_run_resumes(tmp_path: Path, lagging: Ran) -> None:
    """Its repetition is `test_a_lost_engine_and_a_lost_learner_change_nothing`."""
    recipe, one, other = write_recipe(tmp_path, **LAG), lagging[2], tmp_path / "runs" / "small"
    shutil.copytree(one, other)
    for step in (3, 4):  # as if it had been stopped after step 2
        shutil.rmtree(other / "checkpoints" / f"step_{step}")
        (other / "samples" / f"step_{step}.jsonl").unlink()
    done = command_here("train", recipe, "--resume")
    assert done.returncode == 0 and "step 3/4" in done.stdout, done.stdout + done.stderr
    assert_same(other, one)
    assert [row["lag/max"] for row in rows(other, 1)] == [0, 1, 1, 1]
    assert overlap_s(one / "ledger.csv") > 0


def assert_same(run: Path, other: Path) -> None:
    """The same samples in every step, and the same weights at the end."""
    for step in (1, 2, 3, 4):
        assert samples(run, step) == samples(other, step)
    mine, theirs = (load_file(of / "checkpoints" / "step_4" / "model.safetensors") for of in (run, other))
    assert mine.keys() == theirs.keys()
    for name, weights in mine.items():
        np.testing.assert_array_equal(weights, theirs[name])


def test_a_cluster_without_slots_for_both_is_refused(tmp_path: Path) -> None:
    done = command_here("train", write_recipe(tmp_path, **LAG, cluster__cpus=2, learner__max_slots_per_rank=2))
    assert done.returncode == 2 and not (tmp_path / "runs" / "small").exists()
    assert "rollout.max_lag_steps: the learner (learner.ranks × learner.max_slots_per_rank = 2) and the engines" in done.stderr


class Struck(HookedRun):
    """Kills the only engine in step 2's rollout, and the learner in step 3's, both beside an update."""

    struck: set[str]

    def generate(self, step: Step, roll_out: Callable[[], list[Sample]]) -> list[Sample]:
        def strike() -> None:
            stages = self.parts.stages
            victim = {2: stages.rollout.pool.working, 3: stages.learn.worker_group.by_rank}.get(step.number, [])
            name = f"{step.number}"
            if self.is_beside_update and victim and name not in self.struck and (pid := pid_of(victim[0])):
                self.struck.add(name)
                os.kill(pid, signal.SIGKILL)

        with watched_phases(self, strike):
            return roll_out()


def test_a_lost_engine_and_a_lost_learner_change_nothing(tmp_path: Path, lagging: Ran) -> None:
    with Struck(Recipe.parse(small_recipe(tmp_path, **LAG))) as run:
        run.struck = set()
        steps = list(run)
    folder = tmp_path / "runs" / "small"
    assert run.struck == {"2", "3"}
    told = rows(folder, 1)
    # the engine may have had nothing to lose yet
    assert sum(row["faults/replaced"] for row in told) > 0 and sum(row["faults/learner_restarts"] for row in told) == 1
    tokens, same_tokens = ([[s.completion.token_ids.tolist() for s in step.samples] for step in of] for of in (lagging[1], steps))
    assert len(tokens) == 4 and tokens == same_tokens
    assert_same(folder, lagging[2])


class Watched(HookedRun):
    """Keeps the log-probabilities that the learner computed beside the rollout, by step and sample.

    Its updates end before rollouts, whose tails are long enough for a pass on any machine: engines wait for the driver, which reads no
    more of their reports while a pass runs.
    """

    proximal: dict[int, dict[int, np.ndarray]]

    def generate(self, step: Step, roll_out: Callable[[], list[Sample]]) -> list[Sample]:
        if not self.is_beside_update:
            return roll_out()
        self.parts.stages.learn.update.result()
        passes, poll = self.parts.stages.learn.passes.logprobs, EarlyWork.poll
        if passes is not None:
            passes._takes_s = lambda tokens: 0.0  # type: ignore[method-assign]

        def wait_for_pass(beside: EarlyWork, seconds: float) -> None:
            poll(beside, seconds)
            ray.wait(refs, num_returns=len(refs), timeout=60) if (refs := beside.refs()) else None

        with engines_in_step(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(EarlyWork, "poll", wait_for_pass)
            return roll_out()

    def __enter__(self) -> Self:
        run = super().__enter__()
        call_before(self.parts.stages.learn, "advantages", self.keep)
        return run

    def keep(self) -> None:
        passes, number = self.parts.stages.learn.passes.logprobs, self.parts.session.step.number
        self.proximal[number] = {} if passes is None else {key: found["old"] for key, found in passes.known.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm__filter_range": [-3.6, 0.0], "algorithm__filter_draw": 1.9, "algorithm__filter_patience": 90, "lora__rank": 4},
        {
            "algorithm__advantage": {"estimator": "gae"},
            "algorithm__kl": {"coefficient": 0.01, "place": "reward"},
            "algorithm__epochs": 2,
            "rollout__prefix_kv": "on",
            "rollout__max_tokens": 96,
        },
        {"reward": {}, "prompts__batch_prompts": 4},
    ],
    ids=["filtered groups and adapters", "critic, reference and prefix KV", "agent"],
)
def test_other_features_work_with_a_lag(tmp_path: Path, settings: dict[str, Any]) -> None:
    tree = small_recipe(tmp_path, **{**LAG, "run__steps": 3, **{key: value for key, value in settings.items() if "__" in key}})
    if "reward" in settings:
        (tmp_path / "agent.py").write_text(AGENT)
        tree |= {"reward": {}, "agent": {"path": str(tmp_path / "agent.py"), "max_tokens": 96, "turn_tokens": 8}}
    with Watched(recipe := Recipe.parse(tree)) as run:
        run.proximal = {}
        steps = list(run)
    assert [step.metrics["lag/max"] for step in steps] == [0, 1, 1]
    assert all(step.stats is not None and step.stats.applied for step in steps)
    if "algorithm__filter_range" in settings:
        versions = {step.number: {version for s in step.samples for version, _ in s.completion.versions} for step in steps}
        assert all(found <= {number - 2, number - 1} for number, found in versions.items() if number > 1), versions
        assert any(len(found) == 2 for found in versions.values()), "refilled groups are of the newest version"
    if "algorithm__epochs" in settings:
        check_proximal(recipe, tmp_path / "runs" / "small", steps, run.proximal)


def check_proximal(recipe: Recipe, folder: Path, steps: list[Step], proximal: dict[int, dict[int, np.ndarray]]) -> None:
    """They are those of the version before the update, which is newer than the one that drew the tokens, and are in the ledger."""
    policy = CheckpointPolicy(recipe, folder)
    assert proximal[2] or proximal[3]
    for step in steps[1:]:
        assert step.metrics["overlap/logprobs"] == len(proximal[step.number])
        policy.load(step.number - 1)
        for key, found in proximal[step.number].items():
            (sample,) = (s for s in step.samples if s.id == key)
            np.testing.assert_allclose(found, policy.logprobs(sample), atol=1e-4)
    ledger = [row for row in read_ledger(folder / "ledger.csv") if row.lease and row.activity == "work"]
    told = [row for row in ledger if row.kind == "learn" and row.what == "log-probabilities"]
    decoded = [row for row in ledger if row.kind == "rollout"]
    assert any(min(one.to_s, other.to_s) > max(one.from_s, other.from_s) for one in told for other in decoded)


def overlap_s(path: Path) -> float:
    """Seconds in which an engine and the learner hold leases at once."""
    held: dict[str, list[tuple[float, float]]] = {"learn": [], "rollout": []}
    for row in read_ledger(path):
        if row.lease and row.kind in held:
            held[row.kind].append((row.from_s, row.to_s))
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in held["learn"] for b in held["rollout"])
