"""Decoding with drafts in the simulator: against the closed form, and never slower than without."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated.simulate_rollout import simulate_rollout
from placement.catalog import catalog
from placement.simulate import PhaseTimes, named, parse, simulate
from placement.simulate.simulate_step import StepInput
from placement.simulate.step_bounds import step_bounds
from placement.speed.decode_speed import Speed
from placement.speed.drafted_speed import MOST_DRAFTED, DraftedSpeed

PLAIN = Speed(0.01, 2e-4, 1e-7)


@given(st.floats(0.0, 0.95), st.integers(1, 300), st.integers(0, 100_000))
def test_a_step_takes_its_best_number_of_drafts(acceptance: float, running: int, context: int) -> None:
    speed = DraftedSpeed.of(PLAIN, acceptance, 64)
    wanted = min(
        (PLAIN.step_s(running, context) + k * PLAIN.per_seq_s * running) / sum(acceptance**i for i in range(k + 1))
        for k in range(MOST_DRAFTED + 1)
    )
    assert speed.step_s(running, context) == pytest.approx(wanted)
    assert speed.step_s(running, context) <= PLAIN.step_s(running, context) * (1 + 1e-12)


def test_the_planners_terms_are_exact_for_one_sequence_and_for_the_batch() -> None:
    speed = DraftedSpeed.of(PLAIN, 0.5, 64)
    for running in (1, 64):
        assert speed.base_s + speed.per_seq_s * running == pytest.approx(speed.step_s(running))
    assert speed.step_s(1) < 0.6 * PLAIN.step_s(1) and speed.step_s(1000) > 0.9 * PLAIN.step_s(1000), "a wide batch computes"


def test_every_policy_is_faster_with_drafts_and_none_changes_without() -> None:
    setting = parse({"like": "qwen3b-gsm8k-grpo", "nodes": 1, "prompts": 8, "samples": 4, "steps_per_epoch": 1, "epochs": 1})
    plain, drafts = (simulate(setting.but(acceptance=chance), ["fixed", "ours"], 3) for chance in (0.0, 0.6))
    for name in ("fixed", "ours"):
        assert drafts.policies[name].step_s < 0.9 * plain.policies[name].step_s
    with pytest.raises(ValueError, match="`acceptance` must be at least 0"):
        setting.but(acceptance=1.0)


def test_no_rollout_costs_less_than_the_bound_with_drafts() -> None:
    """The planners' terms are above those of more sequences than the batch, and of contexts, which each step reads for several tokens."""
    setting = named("qwen3b-gsm8k-grpo").but(acceptance=0.75)
    times = PhaseTimes.from_setting(setting)
    lengths = np.round(np.random.default_rng(0).lognormal(6, 0.5, 512)).clip(1, 2048)
    prompts = np.full(512, 100.0)
    step = StepInput(lengths, prompts, np.arange(512), lengths[:, None])
    decoding = step_bounds(times, step).cost - step_bounds(replace(times, speed=Speed(1e-15, 0.0)), step).cost
    made = simulate_rollout(lengths, lengths[:, None], times.speed, policy="random", max_actors=1, prompts=prompts)
    assert 0.75 * made.cost < decoding < made.cost
    for running, context in itertools.product((1, 7, 64, 5000), (0, 100_000)):
        assert times.speed.least.step_s(running, context) <= times.speed.step_s(running, context) * (1 + 1e-12)


def test_shipped_acceptance_gives_the_published_speedups() -> None:
    """At one sequence, with drafts that cost nothing."""
    tables = catalog.read("acceptance")
    for source, workload, speedup in (("text", "gsm8k", 2.0), ("text", "livecodebench", 1.33), ("trained", "gsm8k", 3.62)):
        chance = catalog.values(tables[source])[workload]
        assert np.sum(chance ** np.arange(MOST_DRAFTED + 1)) == pytest.approx(speedup, rel=0.03)
    for table in tables.values():
        assert {named(name).lengths for name in ("qwen3b-gsm8k-grpo", "qwen3b-gpqa-grpo", "qwen3b-livecodebench-ppo")} <= table.keys()
