"""Many runs on one pool: against closed forms, small steps of time and brute force, and what holds for every policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated.pool_policies import Interleaved, Market, Partitions
from benchmarks.simulated.pool_work import ArrivingRun, Stage, pool_run, rollout_stages
from benchmarks.simulated.simulate_pool import PoolOutcome, PoolPolicy, Progress, simulate_pool
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.setting import named

SMALL = named("qwen3b-gsm8k-grpo").but(prompts=8)


def stage(kind: str, seconds: Sequence[float], setup_s: float = 0.0, least: int = 1) -> Stage:
    slots = tuple(range(least, least + len(seconds)))
    return Stage(kind, slots, tuple(seconds), (setup_s,) * len(seconds))


def run_of(name: str, *stages: Stage, steps: int = 1, arrival_s: float = 0.0) -> ArrivingRun:
    return ArrivingRun(name, arrival_s, (stages,) * steps, (stages,) * steps)


def held_at(outcome: PoolOutcome, at_s: float) -> dict[str, int]:
    return {hold.run: hold.slots for hold in outcome.holds if hold.from_s <= at_s < hold.to_s}


# ---- the work of a run --------------------------------------------------------------------------------------------


def test_one_engine_takes_as_long_as_its_exact_formula_and_many_take_their_busiest_one() -> None:
    times = PhaseTimes.from_setting(SMALL)
    rng = np.random.default_rng(0)
    lengths, prompts = rng.integers(1, 300, 40), rng.integers(5, 90, 40).astype(float)
    stages = rollout_stages(times, lengths, prompts, [1, 2, 40])
    prefill = [times.prefill_s(float(prompts.sum()), n) for n in (1, 40)]
    assert sum(s.seconds_on(1) for s in stages) == pytest.approx(times.speed.rollout_s(lengths, prompts) + prefill[0])
    alone = sum(
        times.speed.base_s + times.speed.per_seq_s + times.speed.per_ctx_s * (prompts[lengths > at].mean() + at + 0.5)
        for at in range(lengths.max())
    )
    assert sum(s.seconds_on(40) for s in stages) == pytest.approx(alone + prefill[1])
    assert [s.kind for s in stages] == ["rollout", "rollout", "tail", "tail"]


def test_a_run_needs_the_devices_that_hold_its_learner_and_its_cache() -> None:
    run = pool_run("a", SMALL, 2, range(1, 9))
    times = PhaseTimes.from_setting(SMALL)
    assert run.least_slots == times.min_learner == 2 and len(run.steps) == 2
    assert run.forecast[1] == run.steps[0] and run.forecast[0] != run.steps[0]
    with pytest.raises(ValueError, match="learner's state needs 2 devices"):
        pool_run("a", SMALL, 1, [1])


# ---- policies in closed form --------------------------------------------------------------------------------------


def test_a_queue_runs_one_after_another_on_all_devices() -> None:
    runs = [run_of(name, stage("rollout", [8, 4, 3, 2], 1.0), stage("learn", [4, 2, 2, 1]), steps=3) for name in "abc"]
    outcome = simulate_pool(runs, 4, Partitions(4, 1))
    each = 3 * (1 + 2 + 1)  # engines wake before each rollout, the learner stays
    assert [outcome.end_s[name] for name in "abc"] == pytest.approx([each, 2 * each, 3 * each])
    assert outcome.cost == pytest.approx(dict.fromkeys("abc", 4 * each))
    assert outcome.work == pytest.approx(3 * 3 * (8 + 4)) and outcome.work_per_slot_s == pytest.approx(108 / (4 * 36))


def test_static_partitions_with_trainers_leave_one_side_idle() -> None:
    runs = [run_of("a", stage("rollout", [6, 3]), stage("learn", [4, 2])), run_of("b", stage("rollout", [6, 3]), stage("learn", [4, 2]))]
    outcome = simulate_pool(runs, 6, Partitions(6, 2, trainers=1))
    assert outcome.end_s == pytest.approx({"a": 3 + 4, "b": 3 + 4})
    assert outcome.cost == pytest.approx({"a": 3 * 7, "b": 3 * 7})
    assert held_at(outcome, 1.0) == {"a": 2, "b": 2} and held_at(outcome, 5.0) == {"a": 1, "b": 1}


def test_interleaved_runs_fill_each_others_gaps_as_a_round_robin() -> None:
    """Two runs whose rollout and learning take as long: after the first rollout both pools always work."""
    runs = [run_of(name, stage("rollout", [5.0]), stage("learn", [5.0]), steps=4) for name in "ab"]
    outcome = simulate_pool(runs, 2, Interleaved(2, 1, trainers=1))
    assert outcome.makespan_s == pytest.approx(5 + 2 * 4 * 5)  # alone one after another: 80
    alone = simulate_pool(runs, 2, Partitions(2, 1, trainers=1))
    assert alone.makespan_s == pytest.approx(80)


def test_a_tail_moves_to_few_devices_and_the_next_rollout_begins_beside_it() -> None:
    long = stage("tail", [10.0, 10.0, 9.5, 9.5])
    runs = [run_of(name, stage("rollout", [16, 8, 5.33, 4]), long, stage("learn", [1.0])) for name in "ab"]
    outcome = simulate_pool(runs, 5, Interleaved(5, 1, trainers=1, slowdown=9.0))
    assert held_at(outcome, 3.0) == {"a": 4} and held_at(outcome, 5.0) == {"a": 1, "b": 3}
    assert outcome.end_s["a"] == pytest.approx(4 + 10 + 1)


def test_a_run_that_would_slow_its_group_too_much_waits() -> None:
    runs = [run_of(name, stage("rollout", [5.0]), stage("learn", [1.0]), steps=2) for name in "abc"]
    assert simulate_pool(runs, 2, Interleaved(2, 1, 1, slowdown=1.0)).makespan_s == pytest.approx(3 * 2 * 6)
    assert simulate_pool(runs, 2, Interleaved(2, 1, 1, slowdown=9.0)).makespan_s == pytest.approx(6 * 5 + 1)


def test_the_market_gives_each_stage_what_is_worth_most() -> None:
    """At the beginning against every division of the pool, by the sum of what the seconds saved are worth."""
    seconds = {"a": [9, 4, 3.5, 3.2, 3.1], "b": [20, 11, 8, 6.5, 6], "c": [5, 3, 2.9, 2.8, 2.7]}
    runs = [run_of(name, stage("rollout", values)) for name, values in seconds.items()]
    outcome = simulate_pool(runs, 6, Market(6, prefer=0.9))
    exchange = 0.9 / 0.1

    def worth(values: list[float], slots: int) -> float:
        """Of the best that this many slots allow, as a bid counts it: a number is offered if it costs less than fewer."""
        least, best = values[0] * (1 + exchange), 0.0
        for count, value in enumerate(values[:slots], 1):
            if count * value + exchange * value < least:
                least, best = count * value + exchange * value, exchange * (values[0] - value)
        return best

    floors = 2  # a third of six
    divisions = [d for d in itertools.product(range(floors, 6), repeat=3) if sum(d) <= 6]
    best = max(sum(worth(values, slots) for values, slots in zip(seconds.values(), d, strict=True)) for d in divisions)
    held = held_at(outcome, 0.5)
    assert sum(worth(seconds[name], slots) for name, slots in held.items()) == pytest.approx(best)


def test_too_few_devices_and_a_policy_that_gives_none_are_errors() -> None:
    with pytest.raises(ValueError, match="a needs 3 devices for its learn stage, got 2"):
        simulate_pool([run_of("a", stage("learn", [1.0], least=3))], 4, Partitions(4, 2))

    class Nobody(Partitions):
        def allocate(self, now_s: float, runs: Sequence[Progress]) -> dict[str, int]:
            return {}

    with pytest.raises(RuntimeError, match="1 runs wait for devices, and none works"):
        simulate_pool([run_of("a", stage("learn", [1.0]))], 1, Nobody(1, 1))


# ---- whatever the runs are ----------------------------------------------------------------------------------------


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[ArrivingRun], int]:
    devices = draw(st.integers(2, 6))
    runs = []
    for i in range(draw(st.integers(1, 4))):
        stages = []
        for kind in ("rollout", "tail", "learn"):
            work, floor = draw(st.floats(1, 30)), draw(st.floats(0, 5))
            least = draw(st.integers(1, 2)) if kind == "learn" else 1
            seconds = [work / n + floor for n in range(least, devices + 1)]
            stages.append(stage(kind, seconds, draw(st.floats(0, 2)), least))
        runs.append(run_of(f"r{i}", *stages, steps=draw(st.integers(1, 3)), arrival_s=draw(st.floats(0, 40))))
    return runs, devices


def policies(devices: int) -> list[PoolPolicy]:
    found: list[PoolPolicy] = [Market(devices), Market(devices, prefer=0.5, handover_s=0.0), Partitions(devices, 1)]
    if devices >= 4:
        found += [Partitions(devices, 2), Partitions(devices, 1, trainers=2), Interleaved(devices, 1, 2, slowdown=3.0)]
    return found


@given(pools())
def test_no_device_has_two_holders_every_run_ends_and_the_bill_adds_up(pool: tuple[list[ArrivingRun], int]) -> None:
    runs, devices = pool
    for policy in policies(devices):
        outcome = simulate_pool(runs, devices, policy)
        assert set(outcome.end_s) == {run.name for run in runs}
        for at in {hold.from_s for hold in outcome.holds}:
            assert sum(held_at(outcome, at).values()) <= devices
        held = {run.name: sum(h.slots * (h.to_s - h.from_s) for h in outcome.holds if h.run == run.name) for run in runs}
        assert sum(held.values()) <= sum(outcome.cost.values()) + 1e-6
        for run in runs:
            assert run.work <= held[run.name] + 1e-6  # no stage costs less than on its cheapest number of devices
            assert outcome.begun_s[run.name] >= run.arrival_s - 1e-9
        if isinstance(policy, Market):
            assert held == pytest.approx(outcome.cost)
        assert outcome.work_per_slot_s <= 1 + 1e-9


@given(pools())
def test_the_market_leaves_no_device_idle_that_somebody_wants_and_starves_nobody(pool: tuple[list[ArrivingRun], int]) -> None:
    """Whoever is let in has its share, or all that it wants. A device is idle only if nobody's bid would rise by it."""
    runs, devices = pool
    seen: list[tuple[dict[str, int], list[Progress], list[str]]] = []

    class Watched(Market):
        def allocate(self, now_s: float, runs: Sequence[Progress]) -> dict[str, int]:
            slots = super().allocate(now_s, runs)
            seen.append((dict(slots), [Progress(one.run, one.step, one.part, one.left) for one in runs], list(self.let_in)))
            return dict(slots)

    market = Watched(devices, prefer=0.9, handover_s=0.0)
    outcome = simulate_pool(runs, devices, market)
    exchange = 9.0
    for slots, progress, let_in in seen:
        there = {one.run.name: one for one in progress}
        for name in let_in:
            one, own = there[name], slots[name]
            expected = one.expected
            wanted = min(expected.slots, key=lambda n: (n + exchange) * expected.seconds_on(n))
            share = devices // len(let_in)
            assert own >= min(share, wanted) or own >= one.stage.slots[0] > share or _forced(there, let_in, devices)
            if sum(slots.values()) < devices and own + 1 <= wanted:
                gain = (own + exchange) * expected.seconds_on(own) - (own + 1 + exchange) * expected.seconds_on(own + 1)
                assert gain <= 1e-6 * max(1.0, expected.seconds_on(own))
    together = sum(step_s(run, run.least_slots) for run in runs) + max(run.arrival_s for run in runs)
    assert max(outcome.end_s.values()) <= 2 * together + 1e-6


def _forced(there: dict[str, Progress], let_in: list[str], devices: int) -> bool:
    """Whether some run cannot do without more than its share, so that others get less than theirs."""
    return any(there[name].stage.slots[0] > devices // len(let_in) for name in let_in)


def step_s(run: ArrivingRun, slots: int) -> float:
    return sum(part.seconds_on(slots) + part.setup_on(slots) for step in run.steps for part in step)


@given(pools(), st.sampled_from([0, 1, 2]))
def test_events_agree_with_small_steps_of_time(pool: tuple[list[ArrivingRun], int], which: int) -> None:
    """The queue and two sets of partitions, against each run integrated by itself in steps of 1/200 s."""
    runs, devices = pool
    policy = [Partitions(devices, 1), Partitions(devices, 2), Partitions(devices, devices // 2)][which]
    if policy.size < 2:
        return
    outcome = simulate_pool(runs, devices, policy)
    free = [0.0] * policy.parts
    for run in sorted(runs, key=lambda run: (run.arrival_s, run.name)):
        place = min(range(policy.parts), key=lambda i: (max(free[i], run.arrival_s), i))
        now = max(free[place], run.arrival_s)
        for step in run.steps:
            kind = ""
            for part in step:
                if (part.kind == "learn") != (kind == "learn") or not kind:
                    now += 0.0 if part.kind == "learn" else part.setup_on(policy.size)
                kind, left = part.kind, 1.0
                while left > 0:
                    left -= 0.005 / part.seconds_on(policy.size)
                    now += 0.005
        free[place] = now
        assert outcome.end_s[run.name] == pytest.approx(now, abs=0.01 * sum(map(len, run.steps)) * len(runs))


def test_the_market_does_more_with_a_pool_than_any_static_division() -> None:
    settings = [SMALL, named("qwen3b-gpqa-grpo").but(prompts=8)]
    runs = [pool_run(f"r{i}", settings[i % 2], 3, range(1, 9), 5.0 * i, seed=i) for i in range(6)]
    market = simulate_pool(runs, 8, Market(8)).work_per_slot_s
    static = [Partitions(8, parts, trainers) for parts in (1, 2, 3) for trainers in (0, 2) if 8 // parts > trainers]
    assert market > max(simulate_pool(runs, 8, policy).work_per_slot_s for policy in static)
    assert math.isclose(market, simulate_pool(runs, 8, Market(8)).work_per_slot_s)  # deterministic
