"""Runs whose responses outlive a step: versions and log-probabilities token by token, the bound, and resume."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from benchmarks.common.call_hooks import surround
from benchmarks.common.fault_injection import pid_of
from benchmarks.common.repeated_run import RepeatedRun, orders_of
from placement.scaling.take_weights import TakeWeights
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.rollout.live_rollout import LiveRollout
from rlhfless_ray.session.early_work import EarlyWork
from rlhfless_ray.session.weight_timing import WeightTiming
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Sample, UpdateStats
from tests.compat.test_runs import AGENT
from tests.conftest import small_recipe
from tests.run_files import CheckpointPolicy, HookedRun, engines_in_step, rows, watched_phases

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]

AHEAD = {"rollout__ahead": True}
PARTIAL = {
    "run__steps": 3,
    "rollout__partial": "continue",
    "rollout__max_lag_steps": 2,
    "rollout__oversample": 2,
    "rollout__max_tokens": 400,
    "rollout__stream_interval_s": 0.02,
    "evaluate__prompts": 0,  # greedy responses of such a policy never end
    "checkpoint__every_steps": 1,
    "checkpoint__keep": 9,
}


def orders(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the recorded orders of completion of the step's rollouts."""
    paths = [run / "samples" / name for name in (f"order_{step}_ahead.json", f"order_{step}.json")]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def recomputed(recipe: Recipe, folder: Path, steps: list[Step]) -> dict[int, dict[int, np.ndarray]]:
    """Log-probabilities of each response under each version that drew a part of it, by id of the sample and version."""
    policy = CheckpointPolicy(recipe, folder)
    drawn: dict[int, list[Sample]] = {}
    for step in steps:
        for sample in step.samples:
            for version, _ in sample.completion.versions:
                drawn.setdefault(version, []).append(sample)
    found: dict[int, dict[int, np.ndarray]] = {}
    for version, by in drawn.items():
        policy.load(version)
        for sample in by:
            found.setdefault(id(sample), {})[version] = policy.logprobs(sample)
    return found


def by_version(sample: Sample, under: dict[int, dict[int, np.ndarray]]) -> np.ndarray:
    """Log-probabilities of a response's tokens, each under the version that drew it."""
    found, at = [], 0
    for version, tokens in sample.completion.versions:
        found.append(under[id(sample)][version][at : at + tokens])
        at += tokens
    return np.concatenate(found)


def check_each_token(recipe: Recipe, folder: Path, steps: list[Step]) -> None:
    """Assert that each token has the log-probability that the version which drew it gives it."""
    under = recomputed(recipe, folder, steps)
    for sample in (sample for step in steps for sample in step.samples):
        np.testing.assert_allclose(sample.completion.logprobs, by_version(sample, under), atol=1e-4)


class LongUpdate(Runtime):
    """Its updates end, for the rollout beside them, after some of its responses: not before engines have begun, on a busy machine."""

    def __enter__(self) -> Self:
        run = super().__enter__()
        surround(self.parts.session, "update_is", self.late)
        return run

    def late(self, update_is: Callable[[Pending[UpdateStats]], Any], pending: Pending[UpdateStats]) -> Any:
        phase, seen = self.parts.stages.context.record.progress.phase, list[str]()

        def look(what: str) -> None:
            phase(what)
            if what.startswith("rollout: ") and int(what.split()[1]) >= 4:
                seen.append(what)

        self.parts.stages.context.record.progress.phase = look  # type: ignore[method-assign]
        return update_is(replace(pending, is_ready=lambda: bool(seen) and pending.is_ready()))


def with_agent(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add an agent of two to four turns, so that a step's end finds episodes in the middle."""
    assert AGENT.count("self.turn == 3") == 1
    (folder / "agent.py").write_text(AGENT.replace("self.turn == 3", "self.turn == 2 + sum(str(states['label']).encode()) % 3"))
    return tree | {"reward": {}, "agent": {"path": str(folder / "agent.py"), "max_tokens": 400, "turn_tokens": 60}}


def check_log_probabilities(recipe: Recipe, folder: Path, steps: list[Step]) -> list[dict[str, Any]]:
    """Some responses are of several versions, and each token has the log-probability of the version that drew it. Returns the metrics."""
    under, mixed = recomputed(recipe, folder, steps), 0
    for step in steps:
        assert len(step.samples) == 32
        for sample in step.samples:
            versions = sample.completion.versions
            mixed += len(versions) > 1
            assert step.number - 1 - versions[0][0] <= recipe.rollout.max_lag_steps
            wanted = by_version(sample, under)
            drawn = slice(None) if sample.action_mask is None else sample.action_mask
            np.testing.assert_allclose(sample.completion.logprobs[drawn], wanted[drawn], atol=1e-4)
    assert mixed > 0
    told = rows(folder, 1)
    assert max(row["lag/max"] for row in told) in (1, 2) and told[-1]["partial/in_flight_groups"] == 0
    assert sum(row["partial/recomputed_tokens"] for row in told) > 0
    return told


@pytest.mark.parametrize("case", ["ahead", "agent", pytest.param("moves", marks=pytest.mark.long)])
def test_each_token_has_the_log_probability_of_its_version_across_updates(tmp_path: Path, case: str) -> None:
    """See also the next test, in which no rollout is ahead."""
    more: dict[str, Any] = {
        "ahead": AHEAD | {"rollout__max_lag_steps": 1, "rollout__oversample": 1},
        "moves": {"rollout__migrate": "tau", "rollout__migrate_tau": 0.1, "rollout__min_actors": 2, "rollout__oversample": 1.5},
    }.get(case, {})
    tree = small_recipe(tmp_path, **PARTIAL | more)
    recipe = Recipe.parse(with_agent(tree, tmp_path) if case == "agent" else tree)
    with (LongUpdate if case == "ahead" else Runtime)(recipe) as run:
        steps = list(run)
    told = check_log_probabilities(recipe, tmp_path / "runs" / "small", steps)
    if case == "moves":
        assert sum(row["rollout/moved"] for row in told) > 0
    if case == "ahead":
        assert sum(row["partial/ahead_tokens"] for row in told) > 0
        assert not any(row["partial/in_flight_groups"] for row in told), "each step trains the groups that were begun for it"


def test_a_rollout_may_go_on_under_the_old_weights_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update ends first, and engines do not take its weights. The bound holds, and no response has two versions."""
    monkeypatch.setattr(WeightTiming, "_decide", lambda self, rollout: TakeWeights(0.02, "they wait"))
    recipe = Recipe.parse(small_recipe(tmp_path, **PARTIAL | AHEAD | {"rollout__max_lag_steps": 1, "rollout__oversample": 1}))
    with LongUpdate(recipe) as run:
        steps = list(run)
    folder = tmp_path / "runs" / "small"
    told = rows(folder, 1)
    assert [(row["lag/mean"], row["partial/in_flight_groups"]) for row in told] == [(0, 0), (1, 0), (1, 0)]
    assert all(row["partial/weights_wait_s"] > 0 and row["partial/weights_reason"] == "they wait" for row in told[1:])
    assert not any(row["partial/continued"] for row in told), "nothing pauses"
    check_each_token(recipe, folder, steps)


class HeldForPasses(HookedRun):
    """Its driver looks at the engine again only once a pass over a group that will certainly be trained has ended. The engine may be
    far ahead of a driver that gets no time on a busy machine, and a rollout ends with its last report."""

    def generate(self, step: Step, roll_out: Callable[[], list[Sample]]) -> list[Sample]:
        poll = EarlyWork.poll

        def hold(tail: EarlyWork, seconds: float) -> None:
            poll(tail, seconds)
            end_s = time.monotonic() + 60
            while tail.settled and not tail.learning.passes.logprobs.known and time.monotonic() < end_s:
                time.sleep(0.02)
                poll(tail, seconds)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(EarlyWork, "poll", hold)
            return roll_out()


def test_passes_over_groups_that_are_certain_to_be_trained_change_nothing_but_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring and the learner take the slot that no engine has. A run that repeats the responses and does all in turn draws the same
    tokens and makes the same updates."""
    monkeypatch.setattr(LiveRollout, "tail_s", lambda self: 1000.0)
    tree = small_recipe(
        tmp_path, **PARTIAL, rollout__max_actors=1, cluster__cpus=2, learner__micro_batch_tokens=64, algorithm__updates_per_step=2
    )
    recipe, folder = Recipe.parse(tree), tmp_path / "runs" / "small"
    with engines_in_step(), HeldForPasses(recipe) as run:
        steps = list(run)
    early = check_log_probabilities(recipe, folder, steps)
    with RepeatedRun(Recipe.parse(tree | {"run": tree["run"] | {"name": "again"}}), orders_of(folder)) as run:
        for step, again in zip(steps, run, strict=True):
            for sample, same in zip(step.samples, again.samples, strict=True):
                assert sample.completion.versions == same.completion.versions
                assert sample.completion.token_ids.tolist() == same.completion.token_ids.tolist()
                np.testing.assert_allclose(sample.completion.logprobs, same.completion.logprobs, atol=1e-4)
    late = rows(tmp_path / "runs" / "again", 1)
    assert any(row["overlap/scored"] for row in early) and any(row["overlap/logprobs"] for row in early)
    for one, other in zip(early, late, strict=True):
        assert one["tokens/trained"] == other["tokens/trained"] and one["lag/max"] == other["lag/max"]
        for name in ("reward/mean", "learn/loss", "learn/grad_norm", "learn/importance_mean", "learn/effective_share", "lag/kl_0"):
            if name in one or name in other:  # a late driver may find all responses of a step finished, none of the newest version
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def under_kept_kv(policy: CheckpointPolicy, sample: Sample) -> np.ndarray:
    """Log-probabilities of a response whose context each version computed as far as it drew: from the reference's own KV cache."""
    completion, cache, found = sample.completion, None, list[np.ndarray]()
    tokens = torch.tensor([[*sample.prompt.token_ids, *completion.token_ids.tolist()]])
    at, computed = len(sample.prompt.token_ids), 0
    for version, count in completion.versions:
        policy.load(version)
        end = at + count - 1  # the last token that a version draws is computed by the next one
        with torch.no_grad():
            out = policy.model(tokens[:, computed:end], past_key_values=cache, use_cache=True)
        logprobs = out.logits[0, at - 1 - computed :].log_softmax(-1).numpy()
        found.append(logprobs[np.arange(count), completion.token_ids[at - len(sample.prompt.token_ids) :][:count]])
        cache, computed, at = out.past_key_values, end, at + count
    return np.concatenate(found)


@pytest.mark.parametrize("case", ["in turn", "ahead, engines without prefix KV"])
def test_a_response_keeps_the_kv_of_older_weights(tmp_path: Path, case: str) -> None:
    more = AHEAD | {"rollout__max_lag_steps": 1, "rollout__oversample": 1, "rollout__prefix_kv": "off"} if case != "in turn" else {}
    more |= {"run__steps": 2, "rollout__partial_kv": "keep", "rollout__block_size": 32}
    recipe = Recipe.parse(small_recipe(tmp_path, **PARTIAL | more))
    with engines_in_step(), (Runtime if case == "in turn" else LongUpdate)(recipe) as run:
        steps = list(run)
    folder = tmp_path / "runs" / "small"
    told = rows(folder, 1)
    continued, kept, computed = (sum(row[f"partial/{name}"] for row in told) for name in ("continued", "kept_tokens", "recomputed_tokens"))
    assert continued > 0 and computed == continued, "one token of each continued response is computed: its last"
    assert kept > 10 * continued
    policy = CheckpointPolicy(recipe, folder)
    mixed = [sample for step in steps for sample in step.samples if len(sample.completion.versions) > 1]
    assert mixed
    for sample in mixed:
        np.testing.assert_allclose(sample.completion.logprobs, under_kept_kv(policy, sample), atol=1e-4)


def test_lost_pages_are_computed_under_the_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ticket is unknown to the engine. The run goes on, and its log-probabilities are those of the versions alone."""
    import rlhfless_ray.rollout.kept_pages as keeping

    monkeypatch.setattr(keeping.KeptPages, "attach", lambda self, number, requests: {})
    recipe = Recipe.parse(small_recipe(tmp_path, **PARTIAL, rollout__partial_kv="keep", functions__keep_alive_s=0.0))
    with Runtime(recipe) as run:
        steps = list(run)
    told = rows(tmp_path / "runs" / "small", 1)
    assert sum(row["partial/recomputed_tokens"] for row in told) > 10 * sum(row["partial/continued"] for row in told) > 0
    check_each_token(recipe, tmp_path / "runs" / "small", steps)


class Struck(HookedRun):
    """Kills the only engine in the first rollout."""

    def generate(self, step: Step, roll_out: Callable[[], list[Sample]]) -> list[Sample]:
        self.struck, engines = getattr(self, "struck", False), self.parts.stages.rollout.pool

        def strike() -> None:
            if step.number == 1 and not self.struck and engines.working and (pid := pid_of(engines.working[0])):
                self.struck = True
                os.kill(pid, signal.SIGKILL)

        with engines_in_step(), watched_phases(self, strike):  # an engine that has answered all before the driver looks leaves nothing cut
            return roll_out()


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.long), AHEAD], ids=["in turn", "ahead"])
def test_a_resumed_run_goes_on_with_what_was_in_flight(tmp_path: Path, more: dict[str, Any]) -> None:
    """An engine is lost in step 1. The run is left after it. Tokens from before and after both have their versions' log-probabilities."""
    tree = small_recipe(tmp_path, **PARTIAL | {"run__steps": 4} | more)
    with Struck(Recipe.parse(tree)) as run:
        step = next(iter(run))
    assert run.struck and step.metrics["rollout/orphans"] > 0
    folder = tmp_path / "runs" / "small"
    state = json.loads((folder / "checkpoints" / "step_1" / "driver.json").read_text())
    in_flight = {(g["row"], g["begun"]): [s["completion"] for s in g["samples"]] for g in state["in_flight"]}
    assert step.metrics["partial/in_flight_groups"] == 8 and len(in_flight) == (16 if more else 8), "with those begun beside the update"
    assert any(begun["finish_reason"] == "cut" and begun["token_ids"] for group in in_flight.values() for begun in group)
    with Runtime(Recipe.parse(tree), resume=True) as run:
        steps = list(run)
    assert [step.number for step in steps] == [2, 3, 4]
    gone_on = set()
    for step in steps:
        (order,) = (found for found in orders(folder, step.number) if found["trained"] is not None)
        for place, group in enumerate(tuple(order["groups"][g]) for g in order["trained"]):
            gone_on.add(group)
            for begun, sample in zip(in_flight.get(group, []), step.samples[4 * place :], strict=False):
                made = len(begun["token_ids"])
                assert sample.completion.token_ids[:made].tolist() == begun["token_ids"]
                assert sample.completion.logprobs[:made].tolist() == np.array(begun["logprobs"], np.float32).tolist()
    assert gone_on >= set(in_flight)
    assert [row["partial/in_flight_groups"] for row in rows(folder, 1)] == [8, 8, 8, 0]
    check_each_token(Recipe.parse(tree), folder, [step, *steps])


@pytest.mark.parametrize("case", ["agents begin again", "filtered groups", "critic and reference"])
def test_other_features_work_with_partial_rollouts(tmp_path: Path, case: str) -> None:
    more = {
        "agents begin again": {"rollout__partial": "restart"},
        "filtered groups": {
            "rollout__oversample": "auto",
            "rollout__max_tokens": 24,
            "algorithm__filter_range": [-3.6, 0.0],
            "algorithm__filter_patience": 90,
        },
        "critic and reference": {"algorithm__advantage": {"estimator": "gae"}, "algorithm__kl": {"coefficient": 0.01, "place": "reward"}},
    }[case]
    tree = small_recipe(tmp_path, **PARTIAL | more)
    with Runtime(Recipe.parse(with_agent(tree, tmp_path) if case == "agents begin again" else tree)) as run:
        steps = list(run)
    assert all(len(step.samples) == 32 and step.stats is not None and step.stats.applied for step in steps)
    told = rows(tmp_path / "runs" / "small", 1)
    assert sum(row["partial/in_flight_groups"] for row in told) > 0 == told[-1]["partial/in_flight_groups"]
    if case == "filtered groups":
        assert sum(row["filter/dropped_prompts"] for row in told) > 0
        assert told[0]["partial/oversample"] == 1.5 and "against a synchronous step" in told[-1]["partial/oversample_reason"]
        assert all(-3.6 < np.mean([s.reward for s in step.samples[at : at + 4]]) < 0 for step in steps for at in range(0, 32, 4))
    elif case == "critic and reference":
        check_each_token(Recipe.parse(tree), tmp_path / "runs" / "small", steps)
        assert any(len(s.completion.versions) > 1 for step in steps for s in step.samples)
        assert all(row["critic/loss"] > 0 for row in told)
    else:
        assert all(len(s.completion.versions) == 1 for step in steps for s in step.samples)
        assert sum(row["partial/restarted"] for row in told) > 0
