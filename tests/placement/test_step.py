from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import Speed, StepPlan, StepWork, frontier, step_bounds, step_frontier
from placement.step import end_times
from placement.workload import Workload


def token_by_token(lengths: np.ndarray, prompts: np.ndarray, speed: Speed) -> np.ndarray:
    """When each sequence of an actor ends, one decode step after the other; whole lengths."""
    ends, clock = np.zeros(len(lengths)), 0.0
    for step in range(int(lengths.max())):
        alive = lengths > step
        # the model's context is the area under the straight line from p to p + L, so a step holds half a token more
        clock += speed.step_s(alive.sum(), (prompts[alive] + step + 0.5).sum())
        ends[lengths == step + 1] = clock
    return ends


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8), st.floats(1e-4, 0.1), st.floats(0, 1e-2), st.floats(0, 1e-4),
    st.integers(0, 50),
)
@settings(deadline=None, max_examples=40)
def test_end_times_are_those_of_decoding_step_by_step(
    lengths: list[int], base_s: float, per_seq_s: float, per_ctx_s: float, prompt: int
) -> None:
    speed, values = Speed(base_s, per_seq_s, per_ctx_s), np.array(lengths, float)
    prompts = np.arange(len(values)) * float(prompt)
    kind = Workload.of(values, speed, max_actors=1, prompts=prompts).kinds[0]
    assert end_times(values[:, None], prompts, kind)[:, 0] == pytest.approx(token_by_token(values, prompts, speed))


def test_end_times_in_waves() -> None:
    speed, values = Speed(0.01, 0.001), np.array([30.0, 100.0, 80.0, 20.0])
    kind = Workload.of(values, speed, max_actors=1, capacity=180).kinds[0]
    ends = end_times(values[:, None], np.zeros(4), kind)[:, 0]
    first_s = 0.01 * 100 + 0.001 * 180
    assert ends[1] == pytest.approx(first_s)
    assert ends[0] == pytest.approx(first_s + 0.01 * 30 + 0.001 * 50)


def labellings(n: int) -> Iterator[list[int]]:
    def grow(labels: list[int]) -> Iterator[list[int]]:
        if len(labels) == n:
            yield labels
            return
        for g in range(max(labels, default=-1) + 2):
            yield from grow([*labels, g])

    yield from grow([])


def exhaustive(
    lengths: np.ndarray, prompt_ids: np.ndarray, speed: Speed, work: StepWork, devices: int
) -> list[tuple[float, float]]:
    """Every partition, every order of the gang's work and every start that could matter, on a clock of its own.

    The gang's work is cut into jobs (a response's score and reference, a prompt's gradients, which need its scores); a
    schedule is an order of jobs and a start. Only starts at which some job follows without a wait can be undominated, so
    those are tried: the slots' release, and for every job its release minus what comes before it in the order.
    """
    points = []
    prompts = sorted(set(prompt_ids.tolist()))
    for labels in labellings(len(lengths)):
        count = max(labels) + 1
        if count > devices:
            continue
        groups = [np.flatnonzero(np.array(labels) == g) for g in range(count)]
        ends = np.zeros(len(lengths))
        for group in groups:
            ends[group] = token_by_token(lengths[group], np.zeros(len(group)), speed)
        actor_end = sorted(ends[group].max() for group in groups)
        free = max([0.0, *actor_end[: max(0, count - (devices - work.learners))]])
        jobs = [(ends[i], work.score_per_seq_s + work.reference_per_token_s * lengths[i], -1) for i in range(len(lengths))]
        for p in prompts:
            own = prompt_ids == p
            at = ends[own].max() if work.overlap else ends.max()
            jobs.append((at, work.learn_per_token_s * lengths[own].sum(), p))
        rollout_cost = sum(actor_end)
        for order in itertools.permutations(range(len(jobs))):
            place = {job: k for k, job in enumerate(order)}
            learned = {jobs[j][2]: place[j] for j in order if jobs[j][2] >= 0}
            needs = prompts if not work.overlap else None
            if any(
                place[i] > learned[p] for i in range(len(lengths)) for p in (needs or [int(prompt_ids[i])])
            ):
                continue
            before = np.cumsum([0.0, *(jobs[j][1] for j in order)])
            starts = {free} | {jobs[j][0] - before[k] - work.learn_start_s for k, j in enumerate(order)}
            for start in starts:
                if start < free:
                    continue
                clock = start + work.learn_start_s
                for j in order:
                    clock = max(clock, jobs[j][0]) + jobs[j][1]
                end = clock + work.update_s + work.publish_s
                points.append((end, rollout_cost + work.learners * (end - start)))
    best: list[tuple[float, float]] = []
    for time_s, cost in sorted(points):
        if not best or cost < best[-1][1]:
            best.append((time_s, cost))
    return best


def gap(plans: list[StepPlan], points: list[tuple[float, float]]) -> float:
    return max(min(max(p.time_s / t, p.cost / c) for p in plans) for t, c in points) - 1


def case(seed: int, n: int) -> tuple[np.ndarray, np.ndarray, Speed, StepWork, int]:
    rng = np.random.default_rng(seed)
    ids = np.arange(n) % max(1, n // 2)
    lengths = (rng.lognormal(3, 0.5, n)[ids] * rng.lognormal(0, 0.4, n)).round() + 1
    devices = int(rng.integers(2, 5))
    overlap = bool(seed % 3)
    work = StepWork(
        score_per_seq_s=rng.uniform(0, 0.05), reference_per_token_s=0.001, learn_per_token_s=rng.choice([0.002, 0.01]),
        learn_start_s=0.1, update_s=0.2, publish_s=0.1, learners=int(rng.integers(1, devices + 1)), overlap=overlap,
        reason="" if overlap else "advantages are whitened over the batch",
    )
    return lengths, ids, Speed(0.01, 10 ** rng.uniform(-4, -2.3)), work, devices


@pytest.mark.parametrize("seed", range(12))
def test_the_step_s_frontier_is_that_of_an_exhaustive_search(seed: int) -> None:
    lengths, ids, speed, work, devices = case(seed, 4)
    plans = step_frontier(lengths, ids, speed, work, max_devices=devices)
    points = exhaustive(lengths, ids, speed, work, devices)
    assert gap(plans, points) < 0.02
    # and nothing is promised that no schedule does
    for plan in plans:
        assert any(t <= plan.time_s * (1 + 1e-9) and c <= plan.cost * (1 + 1e-9) for t, c in points)


@given(st.integers(0, 10_000), st.integers(1, 20))
@settings(deadline=None, max_examples=20)
def test_bounds_hold_and_overlap_only_helps(seed: int, n: int) -> None:
    lengths, ids, speed, work, devices = case(seed, n)
    plans = step_frontier(lengths, ids, speed, work, max_devices=devices)
    bounds = step_bounds(lengths, ids, speed, work, max_devices=devices)
    for plan in plans:
        assert plan.time_s >= bounds.time_s * (1 - 1e-9) and plan.cost >= bounds.cost * (1 - 1e-9)
        assert sorted(np.concatenate(plan.rollout.groups).tolist()) == list(range(n))
        assert len(plan.gang) == max(0, plan.rollout.actors - (devices - work.learners))
        assert str(work.learners) in plan.reason
    for faster, slower in itertools.pairwise(plans):
        assert faster.time_s < slower.time_s and faster.cost > slower.cost
    held = step_frontier(
        lengths, ids, speed, replace(work, overlap=False, score_early=False, reason="compared"), max_devices=devices
    )
    # single sequences are moved from different starting points, so a fraction of a percent may go either way
    assert gap(plans, [(p.time_s, p.cost) for p in held]) < 0.02


def test_overlap_hides_the_gang_s_work_in_the_tail() -> None:
    """One long response and many short ones: all but the long one's gradients are done while it still runs."""
    lengths = np.array([1000.0] + [100.0] * 32)
    ids = np.arange(33)
    speed = Speed(0.01, 0.0001)
    work = StepWork(learn_per_token_s=0.001, update_s=0.5, publish_s=0.25, learners=1)
    plan = step_frontier(lengths, ids, speed, work, max_devices=2)[0]
    short_s = 32 * 100 * 0.001
    assert plan.time_s == pytest.approx((0.01 + 0.0001) * 1000 + 1000 * 0.001 + 0.75)
    assert plan.early_s == pytest.approx(short_s) and "tail" in plan.reason
    late = replace(work, overlap=False, reason="advantages are whitened over the batch")
    held = step_frontier(lengths, ids, speed, late, max_devices=2)[0]
    assert held.time_s == pytest.approx(plan.time_s + short_s) and "whitened" in held.reason
    assert held.early_s == 0


def test_the_gang_waits_for_its_slots() -> None:
    """With every device in the gang nothing can be learned before the rollout has ended."""
    lengths, ids = np.array([400.0, 50.0, 60.0, 70.0]), np.arange(4)
    work = StepWork(learn_per_token_s=0.001, learners=3)
    for plan in step_frontier(lengths, ids, Speed(0.01, 0.001), work, max_devices=3):
        assert plan.early_s == 0 and plan.learn_at_s >= plan.rollout.time_s * (1 - 1e-9)
        assert len(plan.gang) == plan.rollout.actors


def test_actors_on_the_gang_s_slots_may_end_early_when_that_pays() -> None:
    """64 responses on 4 slots with a gang of 2: the step's fastest plan is faster than any that takes the rollout's frontier
    as it is."""
    rng = np.random.default_rng(5)
    ids = np.repeat(np.arange(16), 4)
    lengths = (rng.lognormal(5, 0.6, 16)[ids] * rng.lognormal(0, 0.2, 64)).round() + 1
    speed, work = Speed(0.002, 0.0005), StepWork(learn_per_token_s=0.0003, learners=2)
    plans = step_frontier(lengths, ids, speed, work, max_devices=4)
    own = {tuple(map(tuple, plan.groups)) for plan in frontier(lengths, speed, max_actors=4, thin=0.01)}
    assert tuple(map(tuple, plans[0].rollout.groups)) not in own
    early = [np.max(token_by_token(lengths[plans[0].rollout.groups[a]], np.zeros(99)[: len(plans[0].rollout.groups[a])], speed))
             for a in plans[0].gang]
    assert max(early) < 0.95 * plans[0].rollout.time_s


def test_scenarios_bill_what_the_gang_waits() -> None:
    """One start serves two scenarios: starting for the earlier one waits in the later one, and the other way round."""
    lengths = np.array([[100.0, 200.0]])
    work = StepWork(learn_per_token_s=0.01, learners=1)
    plans = step_frontier(lengths, np.zeros(1), Speed(0.01, 0.0), work, max_devices=2)
    soon, late = plans[0], plans[-1]
    assert soon.time_s == pytest.approx(np.mean([1 + 1, 2 + 2])) and late.time_s == pytest.approx(np.mean([2 + 1, 2 + 2]))
    assert soon.cost == pytest.approx(1.5 + np.mean([1, 3])) and late.cost == pytest.approx(1.5 + np.mean([1, 2]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StepWork(learners=0), "at least one device"),
        (lambda: StepWork(update_s=-1.0), "update_s"),
        (lambda: StepWork(overlap=False), "reason"),
        (lambda: StepWork(score_early=False), "need scores"),
        (lambda: step_frontier(np.ones(2), np.ones(2), Speed(1, 1), StepWork(learners=3), max_devices=2), "3 devices, there are 2"),
        (lambda: step_frontier(np.ones(2), np.ones(3), Speed(1, 1), StepWork(), max_devices=2), "one per sequence"),
        (lambda: step_frontier(np.ones(2), np.ones(2), Speed(1, 1), StepWork(), max_devices=2, devices_per_actor=4), "actor needs 4"),
    ],
)
def test_bad_input_gets_one_sentence(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
