"""Execution plans: the search against a scheduler written apart, and what every plan must hold."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping

import numpy as np
import pytest

from placement.call_schedule import Option, Problem
from placement.calls import (
    GENERATE,
    OLD,
    REFERENCE,
    TRAIN_CRITIC,
    TRAIN_POLICY,
    VALUES,
    Call,
    Features,
    Kind,
    ModelRole,
    StepGraph,
    in_turn,
    lagged,
    part,
    step_graph,
    with_passes_first,
)
from placement.execution_plan import ExecutionPlan, execution_plan, plan_at, plan_step
from placement.layouts import Layout
from placement.measurements.call_times import CallTimes
from placement.measurements.registry import Measurements
from placement.planning.objective import Objective
from placement.schedule_search import Goal, ScheduleSearch

pytestmark = pytest.mark.pure
PPO = step_graph(Features(values=True, reference=True, reward_model=True, pass_before=True, kl_in_reward=True))


def shortest_s(calls: list[tuple[Call, int, float, float]], slots: int, room: float) -> float:
    """The least seconds of calls (call, slots, seconds, bytes): at each time a call ends, every set of calls that could start is tried."""
    best = [float("inf")]

    def go(now: float, running: list[tuple[float, int]], ended: frozenset[str], left: frozenset[int]) -> None:
        if now >= best[0]:
            return
        if not left and not running:
            best[0] = now
            return
        able = [at for at in left if ended.issuperset(calls[at][0].needs)]
        for size in range(len(able) + 1):
            for started in itertools.combinations(able, size):
                together = [*(at for _, at in running), *started]
                models = [calls[at][0].model for at in together]
                fits = sum(calls[at][1] for at in together) <= slots and sum(calls[at][3] for at in together) <= room
                if not fits or len(set(models)) < len(models) or not together:
                    continue
                now_running = [*running, *((now + calls[at][2], at) for at in started)]
                until = min(end for end, _ in now_running)
                done = {calls[at][0].name for end, at in now_running if end <= until}
                go(until, [one for one in now_running if one[0] > until], ended | done, left.difference(started))

    go(0.0, [], frozenset(), frozenset(range(len(calls))))
    return best[0]


def drawn_problem(rng: random.Random) -> Problem:
    """Up to five calls of up to four models with random needs, up to three layouts each, on up to four slots of one node."""
    calls: list[Call] = []
    for number in range(rng.randint(2, 5)):
        needs = tuple(call.name for call in calls if rng.random() < 0.4)
        calls.append(Call(f"call {number}", rng.choice(list(ModelRole)), Kind.INFER, needs))
    slots = rng.randint(1, 4)
    options = {}
    for call in calls:
        counts = rng.sample(range(1, slots + 1), min(slots, rng.randint(1, 3)))
        work = rng.choice([1.0, 2.0, rng.uniform(0.5, 4)])
        options[call.name] = [Option(Layout(n), work / n ** rng.choice([0.0, 0.5, 1.0]), rng.choice([0, 16, 32])) for n in counts]
    return Problem(StepGraph(tuple(calls)), options, 1, slots, node_bytes=rng.choice([float("inf"), 32, 64]))


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_is_better_than_the_one_found(seed: int) -> None:
    rng = random.Random(seed)
    problem, worth = drawn_problem(rng), rng.choice([0.1, 1.0, 10.0])
    names = [call.name for call in problem.graph.calls]
    least = min(
        sum(one.slot_seconds for one in options)
        + worth
        * shortest_s(
            [(call, one.layout.slots, one.seconds, one.node_bytes) for call, one in zip(problem.graph.calls, options, strict=True)],
            problem.slots,
            problem.node_bytes,
        )
        for options in itertools.product(*(problem.options[name] for name in names))
    )
    search = ScheduleSearch(problem)
    found = search.best(Goal(worth))
    assert found.is_exact and found.slot_seconds + worth * found.seconds == pytest.approx(least)
    assert_possible(execution_plan(problem, found), problem)
    chained = search.best(Goal(worth), exactly=False)
    assert least * (1 - 1e-9) <= chained.slot_seconds + worth * chained.seconds <= 1.03 * least


def assert_possible(plan: ExecutionPlan, problem: Problem) -> None:
    """Assert that calls hold slots alone, run one at a time for a model and after what they need, and fit the memory of nodes."""
    ends = {call.call: call.end_s for call in plan.calls}
    for call in plan.calls:
        assert len(set(call.slots)) == call.layout.slots and set(call.slots) <= set(range(problem.slots))
        assert all(ends[name] <= call.start_s for name in problem.graph[call.call].needs)
        running = [other for other in plan.calls if other.start_s <= call.start_s < other.end_s]
        assert len({slot for other in running for slot in other.slots}) == sum(len(other.slots) for other in running)
        assert len({problem.graph[other.call].model for other in running}) == len(running)
        for node in range(problem.nodes):
            on = [other for other in running if any(slot // problem.slots_per_node == node for slot in other.slots)]
            held = sum(next(o.node_bytes for o in problem.options[other.call] if o.layout == other.layout) for other in on)
            assert held <= problem.node_bytes
    seconds = {call.call: call.end_s - call.start_s for call in plan.calls}
    assert plan.slot_seconds == pytest.approx(sum(len(call.slots) * seconds[call.call] for call in plan.calls))


def ppo_problem(rng: random.Random, nodes: int, slots_per_node: int) -> Problem:
    counts = [2**k for k in range((nodes * slots_per_node).bit_length())]
    options = {}
    for call in PPO.calls:
        work, fixed = rng.uniform(1, 4) * (3 if call.kind is Kind.TRAIN else 1), rng.uniform(0.01, 0.2)
        layouts = [Layout(n // t, t) for n in counts for t in (1, 2, 4, 8) if t <= min(n, slots_per_node)]
        options[call.name] = [Option(one, work * (fixed + (1 - fixed) / one.slots) * rng.uniform(1, 1.3)) for one in layouts]
    change = rng.uniform(0, 0.1)
    return Problem(PPO, options, nodes, slots_per_node, change_s=lambda before, had, call, has: change * (had != has))


@pytest.mark.parametrize("seed", range(4))
def test_many_nodes(seed: int) -> None:
    problem = ppo_problem(random.Random(seed), 16, 8)
    search = ScheduleSearch(problem)
    began_s = time.process_time()
    found = search.best(Goal(128.0))
    assert time.process_time() - began_s < 5  # 0.5 s on an idle machine
    assert_possible(execution_plan(problem, found), problem)


def test_limits() -> None:
    problem = ppo_problem(random.Random(5), 1, 4)
    search = ScheduleSearch(problem)
    fast, cheap = search.best(Goal(1e6)), search.best(Goal(0.0))
    assert fast.seconds < cheap.seconds and cheap.slot_seconds < fast.slot_seconds
    between = search.best(Goal(0.0, most_s=(fast.seconds + cheap.seconds) / 2))
    assert between.is_allowed and cheap.slot_seconds <= between.slot_seconds <= fast.slot_seconds
    assert not search.best(Goal(0.0, most_s=0.9 * fast.seconds)).is_allowed
    assert not search.best(Goal(1e6, most_slot_s=0.9 * cheap.slot_seconds)).is_allowed


@pytest.mark.parametrize("seed", range(3))
def test_the_objective_chooses_as_it_does_among_rollouts(seed: int) -> None:
    problem = ppo_problem(random.Random(seed), 1, 4)
    fast, _ = plan_step(problem, Objective(prefer=1.0))
    cheap, _ = plan_step(problem, Objective(prefer=0.0))
    knee, worth = plan_step(problem, Objective(knee=True))
    assert fast.seconds <= knee.seconds <= cheap.seconds and cheap.slot_seconds <= knee.slot_seconds <= fast.slot_seconds
    assert worth == pytest.approx((fast.slot_seconds - cheap.slot_seconds) / (cheap.seconds - fast.seconds))
    half, _ = plan_step(problem, Objective(prefer=0.5))
    score = [plan.seconds / fast.seconds + plan.slot_seconds / cheap.slot_seconds for plan in (half, fast, knee, cheap)]
    assert score[0] <= min(score) * (1 + 1e-9)
    late, _ = plan_step(problem, Objective(deadline_s=1.1 * fast.seconds))
    assert late.seconds <= 1.1 * fast.seconds and late.slot_seconds <= fast.slot_seconds
    missed, _ = plan_step(problem, Objective(deadline_s=0.5 * fast.seconds))
    assert missed.seconds == fast.seconds and missed.reason.startswith("no plan takes")
    paid, _ = plan_step(problem, Objective(budget=1.1 * cheap.slot_seconds))
    assert paid.slot_seconds <= 1.1 * cheap.slot_seconds * (1 + 1e-9) and paid.seconds <= cheap.seconds
    broke, _ = plan_step(problem, Objective(budget=0.5 * cheap.slot_seconds))
    assert broke.slot_seconds == pytest.approx(cheap.slot_seconds) and broke.reason.startswith("no plan costs")


def by_slots(graph: StepGraph, times: Mapping[str, Mapping[int, float]]) -> Problem:
    """Return the choices of calls whose times depend on their number of slots, of which there are two."""
    options = {name: [Option(Layout(count), took) for count, took in seconds.items()] for name, seconds in times.items()}
    return Problem(graph, options, 1, 2)


def test_updates_run_side_by_side_where_a_second_slot_gains_little() -> None:
    names = (VALUES, OLD, TRAIN_CRITIC, TRAIN_POLICY)
    problem = by_slots(part(PPO, names), {name: {1: 0.7, 2: 0.65} for name in names})
    plan = execution_plan(problem, ScheduleSearch(problem).best(Goal(1.0)))
    assert plan.seconds == pytest.approx(1.4) and plan.is_exact
    assert plan.reason.startswith("1.4 s for 2.8 slot-s: old log-probabilities on 1 beside values on 1, then critic update on 1 beside")


def test_with_a_lag_the_rollout_works_beside_the_update() -> None:
    graph = step_graph(Features())
    times = {GENERATE: {1: 3.0, 2: 1.6}, TRAIN_POLICY: {1: 2.0, 2: 1.5}}
    assert ScheduleSearch(by_slots(graph, times)).best(Goal(9.0)).seconds == pytest.approx(3.1)
    problem = by_slots(lagged(graph), times)
    beside = execution_plan(problem, ScheduleSearch(problem).best(Goal(9.0)))
    assert beside.seconds == pytest.approx(3.0) and beside[GENERATE].start_s == beside[TRAIN_POLICY].start_s == 0
    assert lagged(PPO)[TRAIN_POLICY].needs == tuple(name for name in PPO[TRAIN_POLICY].needs if name != GENERATE)


def test_layouts_change_only_where_it_pays() -> None:
    graph = part(PPO, (VALUES, TRAIN_CRITIC))
    options = {
        VALUES: [Option(Layout(2), 1.0), Option(Layout(1, 2), 0.8)],
        TRAIN_CRITIC: [Option(Layout(2), 1.0), Option(Layout(1, 2), 1.5)],
    }
    for change, seconds in ((0.1, 1.9), (0.3, 2.0)):
        problem = Problem(graph, options, 1, 2, change_s=lambda before, had, call, has, c=change: c * (had != has))
        assert ScheduleSearch(problem).best(Goal(1.0)).seconds == pytest.approx(seconds)


def test_an_option_that_fits_no_node_is_refused() -> None:
    with pytest.raises(ValueError, match="call values: it needs options that fit 1 nodes of 2 slots"):
        Problem(part(PPO, (VALUES,)), {VALUES: [Option(Layout(3), 1.0)]}, 1, 2)
    assert np.isinf(Problem(part(PPO, (VALUES,)), {VALUES: [Option(Layout(2), 1.0)]}, 1, 2).node_bytes)


def test_two_updates_on_a_slot_each_are_weighed_against_two_in_turn() -> None:
    graph = part(PPO, [TRAIN_CRITIC, TRAIN_POLICY])
    turns, options = in_turn(graph), {name: [Option(Layout(), 1.0), Option(Layout(threads=2), 0.6)] for name in graph_names(graph)}
    for slots, ordered, worth, threads, seconds in (
        *((2, graph, 1.0, 1, 1.0), (2, turns, 1.0, 2, 1.2), (2, turns, 0.1, 1, 2.0)),
        *((4, graph, 10.0, 2, 0.6), (4, turns, 10.0, 2, 1.2)),
    ):
        plan = plan_at(Problem(ordered, options, 1, slots), worth)
        assert plan.layouts == dict.fromkeys(graph_names(graph), Layout(threads=threads)) and plan.seconds == pytest.approx(seconds)
        assert plan.has_beside(TRAIN_CRITIC, TRAIN_POLICY) == (ordered is graph) and plan.graph is ordered


def test_a_runs_updates_wait_for_all_passes() -> None:
    graph = with_passes_first(part(step_graph(Features(values=True, reference=True, pass_before=True)), [OLD, REFERENCE, TRAIN_CRITIC]))
    assert set(graph[TRAIN_CRITIC].needs) == {OLD, REFERENCE} and graph[OLD].needs == ()
    assert in_turn(graph)[TRAIN_CRITIC].needs == graph[TRAIN_CRITIC].needs and in_turn(graph)[OLD].needs == (REFERENCE,)


def graph_names(graph: StepGraph) -> list[str]:
    return [call.name for call in graph.calls]


def test_times_of_calls_scale_like_an_update_where_they_were_not_measured_and_survive_a_resume() -> None:
    times = CallTimes()
    update_s = {1: 4.0, 2: 3.0}.__getitem__
    assert times.predict(VALUES, 1, 2, 10.0, update_s) == 3.0 and not times.knows(VALUES)
    for seconds in (9.0, 2.0, 2.0):  # the first one has the warm-up of a process
        times.observe(VALUES, 1, 1, 10.0, seconds)
    assert times.predict(VALUES, 1, 1, 10.0, update_s) == pytest.approx(2.0, rel=0.05)
    assert times.predict(VALUES, 1, 2, 10.0, update_s) == pytest.approx(1.5, rel=0.05)
    assert times.predict(VALUES, 2, 1, 10.0, update_s) == pytest.approx(1.0, rel=0.05), "two ranks, at best"
    measured, again = Measurements(), Measurements()
    measured.calls = times
    measured.settle()
    again.restore(measured.state())
    assert again.calls.predict(VALUES, 1, 2, 10.0, update_s) == times.predict(VALUES, 1, 2, 10.0, update_s)
    again.calls.restore({VALUES: {"1": times.terms[VALUES][1, 1].state()}})  # of a checkpoint that names no ranks
    old = {name: state for name, state in measured.state().items() if name not in ("calls", "side_by_side")}
    Measurements().restore(old)  # of a checkpoint from before there were such times
