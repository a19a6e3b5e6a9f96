from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated.simulate_rollout import simulate_rollout
from placement.simulate.rollout import NAMES, Action, RolloutJob, View, make_policy
from placement.simulate.rollout.run_policy import run
from placement.speed.decode_speed import Speed

SPEED = Speed(8.5e-3, 3e-5)


class Static:
    """A policy that places everything once, optionally changing its mind at given times."""

    def __init__(self, *plans: tuple[float, np.ndarray], hold: frozenset[int] = frozenset()) -> None:
        self.plans, self.hold = list(plans), hold

    def decide(self, view: View) -> Action | None:
        if self.plans and view.time_s >= self.plans[0][0] - 1e-9:
            return Action(self.plans.pop(0)[1], "told so", self.hold)
        return None


def job(lengths: np.ndarray, speed: Speed = SPEED, actors: int = 64, **more: float) -> RolloutJob:
    prompts = more.pop("prompts", np.zeros(len(lengths)))
    return RolloutJob(np.asarray(lengths, float)[:, None], speed, actors, prompts=prompts, **more)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 4), st.integers(0, 50)), min_size=1, max_size=40),
    st.floats(0, 0.05),
    st.floats(1e-6, 1e-3),
    st.sampled_from([0.0, 1e-7, 1e-5]),
    st.floats(0.01, 3.0),
)
@settings(deadline=None, max_examples=40)
def test_a_static_partition_takes_the_time_of_the_formula(
    rows: list[tuple[int, int, int]], base: float, per_seq: float, per_ctx: float, interval: float
) -> None:
    lengths, actor, prompts = (np.array(column) for column in zip(*rows, strict=True))
    speed = Speed(base, per_seq, per_ctx)
    result = run(lengths.astype(float), job(lengths, speed, prompts=prompts.astype(float), interval_s=interval), Static((0.0, actor)))
    expected = {a: speed.rollout_s(lengths[actor == a], prompts[actor == a]) for a in np.unique(actor)}
    assert {lease.actor: lease.to_s - lease.from_s for lease in result.leases} == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert result.time_s == pytest.approx(max(expected.values()), rel=1e-9)
    assert result.cost == pytest.approx(sum(expected.values()), rel=1e-9)


def step_by_step(lengths: np.ndarray, prompts: np.ndarray, speed: Speed, capacity: float) -> float:
    """One actor, whole steps: whoever fits is admitted in order of index, before every step."""
    done = np.zeros(len(lengths))
    inside: list[int] = []
    waiting = list(range(len(lengths)))
    heapq.heapify(waiting)
    seconds = 0.0
    while inside or waiting:
        held = sum(prompts[i] + done[i] for i in inside)
        while waiting and held + prompts[waiting[0]] + done[waiting[0]] + 16 * (len(inside) + 1) <= capacity:
            inside.append(heapq.heappop(waiting))
            held += prompts[inside[-1]] + done[inside[-1]]
        seconds += speed.step_s(len(inside), held)
        done[inside] += 1
        inside = [i for i in inside if done[i] < lengths[i]]
    return seconds


def test_what_does_not_fit_the_cache_waits_for_room() -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(5, 16, 60).astype(float)  # shorter than the reserve, so that the cache never overflows
    prompts = np.full(60, 100.0)
    result = run(lengths, job(lengths, prompts=prompts, capacity=1500), Static((0.0, np.zeros(60, int))))
    assert result.time_s == pytest.approx(step_by_step(lengths, prompts, SPEED, 1500), rel=0.01)
    assert result.time_s > 3 * SPEED.rollout_s(lengths, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
def test_a_cache_that_overflows_still_ends_and_slows(policy: str) -> None:
    rng = np.random.default_rng(4)
    lengths = rng.integers(50, 400, 40).astype(float)
    times = [
        simulate_rollout(
            lengths, lengths[:, None], SPEED, policy=policy, max_actors=2, prefer=0.9, capacity=room, prompts=np.full(40, 10.0)
        ).time_s
        for room in (500, 1500, None)
    ]
    assert times[0] > times[1] > times[2] * 0.999


def test_a_lease_is_paid_from_the_start_and_a_moved_sequence_stands_still() -> None:
    lengths = np.array([100.0, 300.0])
    plan = Static((0.0, np.array([0, 0])), (0.5, np.array([0, 1])))
    result = run(lengths, job(lengths, start_s=0.25, migrate_s=0.4, interval_s=0.1), plan)
    both, alone = SPEED.step_s(2), SPEED.step_s(1)
    made = (0.5 - 0.25) / both
    first = 0.5 + (100 - made) * alone
    second = 0.5 + 0.4 + (300 - made) * alone  # 0.25 s of start lie within the 0.4 s of the move
    assert result.finish_s == pytest.approx([first, second])
    assert [(lease.actor, lease.from_s) for lease in result.leases] == [(0, 0.0), (1, pytest.approx(0.5))]
    assert result.cost == pytest.approx(first + second - 0.5)
    assert result.moves == 1


def test_a_reopened_lease_starts_again_unless_the_actor_is_held() -> None:
    lengths = np.array([10.0, 200.0])
    plans = (0.0, np.array([0, 1])), (1.0, np.array([0, 0]))
    released = run(lengths, job(lengths, start_s=0.5), Static(*plans))
    held = run(lengths, job(lengths, start_s=0.5), Static(*plans, hold=frozenset({0})))
    assert released.time_s == pytest.approx(held.time_s + 0.5)
    assert len(released.leases) == 3 and len(held.leases) == 2
    assert held.cost == pytest.approx(held.time_s + 1.0)


def test_time_and_cost_agree_with_leases_and_ends() -> None:
    rng = np.random.default_rng(5)
    truth = np.round(rng.lognormal(4, 0.7, 100)) + 1
    scenarios = truth[:, None] * rng.lognormal(0, 0.3, (100, 16))
    for policy in NAMES:
        result = simulate_rollout(truth, scenarios, SPEED, policy=policy, max_actors=6, migrate_s=0.02, start_s=0.1)
        again = simulate_rollout(truth, scenarios, SPEED, policy=policy, max_actors=6, migrate_s=0.02, start_s=0.1)
        assert result.time_s == pytest.approx(result.finish_s.max())
        assert result.cost == pytest.approx(sum(lease.to_s - lease.from_s for lease in result.leases))
        assert max(lease.to_s for lease in result.leases) == pytest.approx(result.time_s)
        for a in range(6):
            mine = sorted((lease.from_s, lease.to_s) for lease in result.leases if lease.actor == a)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(mine))
        assert result.time_s >= 0.1 + SPEED.step_s(1) * truth.max() - 1e-9
        assert (again.time_s, again.cost, again.moves) == (result.time_s, result.cost, result.moves)
        assert all(step.reason for step in result.decisions)


class Recorder:
    """Wraps a policy and keeps what it saw and answered."""

    def __init__(self, policy: object) -> None:
        self.policy, self.log = policy, []  # type: ignore[var-annotated]

    def decide(self, view: View) -> Action | None:
        action = self.policy.decide(view)  # type: ignore[attr-defined]
        self.log.append((view.time_s, view.generated, view.finished, None if action is None else action.actor))
        return action


@pytest.mark.parametrize("policy", [name for name in NAMES if name != "oracle"])
@pytest.mark.parametrize("until", [0.35, 1.25])
def test_no_policy_sees_what_has_not_been_generated(policy: str, until: float) -> None:
    """Two truths that agree on everything generated before `until` give the same decisions before `until`."""
    rng = np.random.default_rng(6)
    truth = np.round(rng.lognormal(5, 0.7, 300)) + 1
    work = RolloutJob(truth[:, None] * rng.lognormal(0, 0.4, (300, 8)), SPEED, 8, 0.6, prompts=np.zeros(300))
    one = Recorder(make_policy(policy, work))
    run(truth, work, one)
    seen = max((at, k) for k, (at, *_) in enumerate(one.log) if at <= until + 1e-9)[1]
    while not one.log[seen][2].any():  # a policy that is asked seldom: the first decision that had seen an end
        seen += 1
    _, generated, finished, _ = one.log[seen]
    assert 0 < finished.sum() < 300
    other = truth.copy()
    left = np.flatnonzero(~finished)
    other[left] = np.ceil(generated[left]) + 1 + rng.permutation(truth)[: len(left)]
    two = Recorder(make_policy(policy, work))
    run(other, work, two)
    for (at, *before), (same, *after) in zip(one.log[: seen + 1], two.log[: seen + 1], strict=True):
        assert at == same
        for mine, its in zip(before, after, strict=True):
            assert (mine is None) == (its is None) and (mine is None or np.array_equal(mine, its))


def test_the_view_is_a_copy() -> None:
    class Vandal(Static):
        def decide(self, view: View) -> Action | None:
            view.generated[:] = 1e9
            view.finished[:] = True
            view.ready_s.clear()
            return super().decide(view)

    lengths = np.array([50.0, 80.0])
    result = run(lengths, job(lengths), Vandal((0.0, np.array([0, 0]))))
    assert result.time_s == pytest.approx(SPEED.rollout_s(lengths))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"true_lengths": np.array([])}, "true_lengths"),
        ({"true_lengths": np.array([3.0, np.nan])}, "true_lengths"),
        ({"scenarios": np.ones((3, 4))}, r"shape \(2, S\)"),
        ({"max_actors": 0}, "max_actors"),
        ({"prefer": 1.2}, "prefer"),
        ({"migrate_s": -1.0}, "migrate_s"),
        ({"prompts": np.ones(3)}, "prompts"),
        ({"capacity": 4}, "does not fit"),
    ],
)
def test_bad_input_is_one_sentence(change: dict, word: str) -> None:
    arguments = {"true_lengths": np.array([3.0, 5.0]), "scenarios": np.ones((2, 4)), "policy": "random", "max_actors": 2, **change}
    with pytest.raises(ValueError, match=word):
        simulate_rollout(arguments.pop("true_lengths"), arguments.pop("scenarios"), SPEED, **arguments)


def test_a_policy_that_places_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="actors 0 … 1"):
        run(np.array([3.0]), job(np.array([3.0]), actors=2), Static((0.0, np.array([2]))))
