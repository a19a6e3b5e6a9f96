from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import Plan, Pool, Speed, frontier
from placement.planning.frontier_pools import pool_partitions
from placement.planning.greedy_fill import Ordered, sweep
from placement.planning.workload import RolloutWorkload

SPEED = st.builds(Speed, st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.one_of(st.just(0.0), st.floats(1e-9, 1e-5)))


def lengths_of(least: int, most: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(1, 2000), min_size=least, max_size=most).map(lambda values: np.array(values, float))


def labellings(n: int) -> Iterator[list[int]]:
    """Every partition of n things once, as restricted growth strings."""
    labels = [0] * n

    def from_here(i: int, used: int) -> Iterator[list[int]]:
        if i == n:
            yield labels
            return
        for g in range(used + 1):
            labels[i] = g
            yield from from_here(i + 1, max(used, g + 1))

    yield from from_here(0, 0)


def every_point(
    lengths: np.ndarray, speed: Speed, actors: int, capacity: float = math.inf, prompts: np.ndarray | None = None, transfer_s: float = 0.0
) -> list[tuple[float, float]]:
    """(time, cost) of all partitions, from Speed's own formula, the Pareto points among them."""
    prompts = np.zeros(len(lengths)) if prompts is None else prompts
    memo: dict[int, float | None] = {}

    def seconds(members: int) -> float | None:
        """Of a group, whose members are the bits of a number."""
        if members not in memo:
            at = [i for i in range(len(lengths)) if members >> i & 1]
            fits = (lengths[at] + prompts[at]).sum() <= capacity
            memo[members] = transfer_s + speed.rollout_s(lengths[at], prompts[at]) if fits else None
        return memo[members]

    points = []
    for labels in labellings(len(lengths)):
        if max(labels) >= actors:
            continue
        groups = [0] * (max(labels) + 1)
        for i, g in enumerate(labels):
            groups[g] |= 1 << i
        times = [seconds(members) for members in groups]
        if None not in times:
            points.append((max(times), sum(times)))
    return undominated(points)


def undominated(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    best: list[tuple[float, float]] = []
    for time_s, cost in sorted(points):
        if not best or cost < best[-1][1]:
            best.append((time_s, cost))
    return best


def gap(plans: list[Plan], points: list[tuple[float, float]]) -> float:
    """How far, on the worse axis, the nearest plan is from the point that is matched worst."""
    return max(min(max(p.time_s / t, p.cost / c) for p in plans) for t, c in points) - 1


def check(plans: list[Plan], work: RolloutWorkload) -> None:
    """What holds for every frontier: a true partition, figures that are its own, sorted, nothing dominated."""
    assert plans
    for plan in plans:
        assert sorted(np.concatenate(plan.groups).tolist()) == list(range(len(work.lengths)))
        assert len(plan.pools) == plan.actors == len(plan.groups) and all(len(group) for group in plan.groups)
        assert all(plan.pools.count(q) <= kind.max_actors for q, kind in enumerate(work.kinds))
        assert (plan.time_s, plan.cost) == pytest.approx(work.evaluate(plan.groups, plan.pools), rel=1e-9)
    for faster, slower in itertools.pairwise(plans):
        assert faster.time_s < slower.time_s and faster.cost > slower.cost


@given(lengths_of(1, 7), SPEED, st.integers(1, 7), st.floats(0, 500), st.sampled_from([0.0, 0.3]))
@settings(deadline=None, max_examples=40)
def test_few_sequences_reach_the_optimum_over_all_partitions(
    lengths: np.ndarray, speed: Speed, actors: int, prompt: float, transfer_s: float
) -> None:
    prompts = np.arange(len(lengths)) * prompt
    plans = frontier(lengths, speed, max_actors=actors, prompts=prompts, transfer_s=transfer_s)
    check(plans, RolloutWorkload.from_arguments(lengths, speed, max_actors=actors, prompts=prompts, transfer_s=transfer_s))
    assert gap(plans, every_point(lengths, speed, actors, prompts=prompts, transfer_s=transfer_s)) < 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_nine_sequences_reach_the_optimum_over_all_21147_partitions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(5, [0.05, 0.3, 0.6, 1.0, 0.02, 0.6][seed], 9).round() + 1
    speed = Speed(10 ** rng.uniform(-3, -1.5), 10 ** rng.uniform(-5, -2))
    assert gap(frontier(lengths, speed, max_actors=5), every_point(lengths, speed, 5)) < 1e-6


@given(lengths_of(2, 7), SPEED, st.integers(1, 7), st.floats(1, 3))
@settings(deadline=None, max_examples=30)
def test_groups_fit_the_cache_where_any_partition_does(lengths: np.ndarray, speed: Speed, actors: int, room: float) -> None:
    capacity = math.ceil(lengths.max() * room)
    plans = frontier(lengths, speed, max_actors=actors, capacity=capacity)
    check(plans, RolloutWorkload.from_arguments(lengths, speed, max_actors=actors, capacity=capacity))
    points = every_point(lengths, speed, actors, capacity)
    if points:
        assert all(lengths[group].sum() <= capacity for plan in plans for group in plan.groups)
        assert gap(plans, points) < 1e-6
    else:
        assert any(lengths[group].sum() > capacity for group in plans[0].groups)


@given(lengths_of(2, 40), SPEED, st.integers(1, 12))
@settings(deadline=None, max_examples=40)
def test_the_sweep_is_exact_over_contiguous_partitions(lengths: np.ndarray, speed: Speed, actors: int) -> None:
    """Against a shortest path over positions for every time bound that a group can have."""
    work = RolloutWorkload.from_arguments(lengths, speed, max_actors=actors)
    points = sweep(Ordered.of_known(work), work.kinds[0])
    down, n = np.sort(lengths)[::-1], len(lengths)
    seconds = {(i, j): speed.rollout_s(down[i:j]) for i in range(n) for j in range(i + 1, n + 1)}
    rng = np.random.default_rng(n)
    for bound in rng.choice(sorted(set(seconds.values())), 6):
        best = np.full((actors + 1, n + 1), np.inf)
        best[0, 0] = 0.0
        for k in range(actors):
            for (i, j), t in seconds.items():
                if t <= bound:
                    best[k + 1, j] = min(best[k + 1, j], best[k, i] + t)
        least = best[:, n].min()
        mine = min((p.cost for p in points if p.time_s <= bound * (1 + 1e-9)), default=np.inf)
        assert mine == pytest.approx(least, rel=1e-8) or (math.isinf(mine) and math.isinf(least))


def loss_s(pool: Pool, transfer_s: float) -> float:
    """What one preemption takes: the rest of a start after the notice, the transfer, and one interval if nobody was warned in time."""
    warned = pool.notice_s >= pool.interval_s
    return max(0.0, pool.start_s - pool.notice_s) + transfer_s + (0.0 if warned else pool.interval_s)


def mean_end(ends: list[tuple[float, float, float]]) -> float:
    """Mean of the latest end, over all sets of actors that are struck. ends: undisturbed end, chance to be struck, end then."""
    total = 0.0
    for struck in itertools.product((False, True), repeat=len(ends)):
        chance = math.prod(p if hit else 1 - p for (_, p, _), hit in zip(ends, struck, strict=True))
        total += chance * max(late if hit else soon for (soon, _, late), hit in zip(ends, struck, strict=True))
    return total


@st.composite
def pooled(draw: st.DrawFn, most: int) -> tuple[np.ndarray, list[Pool]]:
    lengths = draw(lengths_of(1, most))
    pools = [
        Pool(
            draw(SPEED),
            price=draw(st.floats(0.2, 3)),
            max_actors=draw(st.integers(1, 3)),
            start_s=draw(st.sampled_from([0.0, 0.5])),
            preempt_per_hour=draw(st.sampled_from([0.0, 30.0])),
            notice_s=draw(st.sampled_from([0.0, 0.3, 2.0])),
            interval_s=draw(st.sampled_from([0.0, 1.0])),
            devices=draw(st.integers(1, 2)),
            capacity=draw(st.one_of(st.none(), st.integers(int(lengths.max()), int(3 * lengths.max())))),
        )
        for _ in range(draw(st.integers(2, 3)))
    ]
    return lengths, pools


@given(pooled(5))
@settings(deadline=None, max_examples=40)
def test_few_sequences_on_several_pools_reach_the_optimum(case: tuple[np.ndarray, list[Pool]]) -> None:
    """Over all partitions and all ways to give their groups to pools, with every set of preempted actors."""
    lengths, pools = case
    points = []
    for labels in labellings(len(lengths)):
        groups = [[i for i, g in enumerate(labels) if g == k] for k in range(max(labels) + 1)]
        for kinds in itertools.product(range(len(pools)), repeat=len(groups)):
            if any(kinds.count(q) > pool.max_actors for q, pool in enumerate(pools)):
                continue
            ends, cost = [], 0.0
            for group, q in zip(groups, kinds, strict=True):
                pool = pools[q]
                if pool.capacity is not None and lengths[group].sum() > pool.capacity:
                    break
                useful_s, rate = pool.start_s + 0.1 + pool.speed.rollout_s(lengths[group]), pool.preempt_per_hour / 3600
                mean_s = useful_s / (1 - rate * loss_s(pool, 0.1))
                struck = 1 - math.exp(-rate * useful_s)
                ends.append((useful_s, struck, useful_s + (mean_s - useful_s) / struck if struck else useful_s))
                cost += mean_s * pool.price * pool.devices
            else:
                points.append((mean_end(ends), cost))
    plans = frontier(lengths, pools=pools, transfer_s=0.1)
    check(plans, RolloutWorkload.from_arguments(lengths, pools=pools, transfer_s=0.1))
    if points:
        assert gap(plans, undominated(points)) < 1e-6


@given(pooled(7))
@settings(deadline=None, max_examples=25)
def test_ranges_of_pools_are_the_best_of_their_family(case: tuple[np.ndarray, list[Pool]]) -> None:
    """Against all contiguous partitions whose groups use each pool in one stretch."""
    lengths, pools = case
    work = RolloutWorkload.from_arguments(lengths, pools=[replace(pool, preempt_per_hour=0.0) for pool in pools])
    order, n = np.argsort(-lengths, kind="stable"), len(lengths)
    points = []
    for count in range(1, n + 1):
        for cuts in itertools.combinations(range(1, n), count - 1):
            groups = np.split(order, cuts)
            for kinds in itertools.product(range(len(pools)), repeat=count):
                stretches = [q for i, q in enumerate(kinds) if i == 0 or kinds[i - 1] != q]
                if len(set(stretches)) < len(stretches):
                    continue
                if any(kinds.count(q) > pool.max_actors for q, pool in enumerate(pools)):
                    continue
                if all(lengths[g].sum() <= work.kinds[q].capacity for g, q in zip(groups, kinds, strict=True)):
                    points.append(work.evaluate(groups, kinds))
    found = pool_partitions(Ordered.of_known(work), work.kinds, 0.0)
    assert bool(points) == bool(found)
    if points:
        # positions between full actors are not cut, so the last actor of a pool may be filled more than is best
        assert gap([point.plan() for point in found], undominated(points)) < 0.05


def test_preemption_makes_a_pool_as_slow_as_its_restarts() -> None:
    """Renewals by simulation: work of u seconds, a Poisson clock at rate r, every strike costs a start that may be struck."""
    rng, rate, start_s, useful_s = np.random.default_rng(0), 1 / 40, 6.0, 30.0
    totals = []
    for _ in range(20_000):
        total = left = start_s + useful_s
        while left > 0:
            strike = rng.exponential(1 / rate)
            if strike >= left:
                break
            left = left - strike + start_s
            total += start_s
        totals.append(total)
    pool = Pool(Speed(1.0, 0.0), start_s=start_s, preempt_per_hour=rate * 3600)
    assert frontier(np.array([useful_s]), pools=[pool])[0].time_s == pytest.approx(np.mean(totals), rel=0.02)


def test_the_time_of_a_plan_is_that_of_its_slowest_actor_with_preemptions() -> None:
    """Several actors against a Poisson clock for each, whose every strike costs a loss that may be struck too."""
    rng, lengths = np.random.default_rng(0), np.array([90.0, 80.0, 70.0, 60.0])
    pool = Pool(Speed(0.1, 0.9), max_actors=4, start_s=9.0, preempt_per_hour=14.0, notice_s=4.0, interval_s=6.0)
    plan = frontier(lengths, pools=[pool])[0]
    assert plan.actors == 4
    work_s, loss, rate = lengths + pool.start_s, loss_s(pool, 0.0), pool.preempt_per_hour / 3600
    times = np.tile(work_s, (100_000, 1))
    strikes = rng.poisson(rate * times)
    while strikes.any():
        times += loss * strikes
        strikes = rng.poisson(rate * loss * strikes)
    assert plan.time_s == pytest.approx(times.max(1).mean(), rel=0.005)
    assert plan.cost == pytest.approx(times.sum(1).mean(), rel=0.005)


def test_what_is_likely_long_goes_where_it_lives() -> None:
    """Same price, one kind may be lost: the longest response is on the other one, and the short ones may go."""
    lengths, speed = np.array([1000.0, 100.0, 90.0, 80.0, 70.0, 60.0]), Speed(0.1, 0.01)
    spot = Pool(speed, max_actors=5, start_s=20.0, preempt_per_hour=30.0)
    lives = Pool(speed, max_actors=1, start_s=20.0)
    for many in (1, 10):  # few sequences, where every partition is tried, and many
        plan = frontier(np.tile(lengths, many), pools=[replace(spot, max_actors=20), replace(lives, max_actors=many)])[0]
        where = {int(i): pool for group, pool in zip(plan.groups, plan.pools, strict=True) for i in group}
        assert all(where[i] == 1 for i in range(0, 6 * many, 6)) and 0 in where.values()


@given(lengths_of(1, 60), SPEED, st.integers(1, 20), st.floats(1, 4))
@settings(deadline=None, max_examples=40)
def test_more_is_never_worse(lengths: np.ndarray, speed: Speed, actors: int, room: float) -> None:
    few = frontier(lengths, speed, max_actors=actors)
    more = frontier(lengths, speed, max_actors=actors + 1)
    assert gap(more, [(p.time_s, p.cost) for p in few]) < 1e-6
    capacity = math.ceil(lengths.sum() / actors * room + lengths.max())
    tight = frontier(lengths, speed, max_actors=actors, capacity=capacity)
    wide = frontier(lengths, speed, max_actors=actors, capacity=2 * capacity)
    assert gap(wide, [(p.time_s, p.cost) for p in tight]) < 1e-6
    assert gap(few, [(p.time_s, p.cost) for p in wide]) < 1e-6


@given(lengths_of(1, 40), SPEED, st.integers(1, 12), st.floats(0.1, 50))
@settings(deadline=None, max_examples=30)
def test_scaled_lengths_scale_the_frontier(lengths: np.ndarray, speed: Speed, actors: int, factor: float) -> None:
    linear = Speed(speed.base_s, speed.per_seq_s)
    plans = frontier(lengths, linear, max_actors=actors)
    scaled = frontier(lengths * factor, linear, max_actors=actors)
    assert gap(scaled, [(p.time_s * factor, p.cost * factor) for p in plans]) < 1e-6
    dear = frontier(lengths, linear, max_actors=actors, price=factor)
    assert [p.cost for p in dear] == pytest.approx([p.cost * factor for p in plans])


@given(lengths_of(30, 300), SPEED, st.integers(1, 40))
@settings(deadline=None, max_examples=20)
def test_a_thin_frontier_is_within_its_share_of_the_whole(lengths: np.ndarray, speed: Speed, actors: int) -> None:
    whole, thin = (frontier(lengths, speed, max_actors=actors, thin=share) for share in (0.0, 0.02))
    assert len(thin) <= len(whole)
    assert gap(thin, [(p.time_s, p.cost) for p in whole]) < 0.021
    assert thin[0].time_s == pytest.approx(whole[0].time_s, rel=1e-5)
    assert thin[-1].cost == pytest.approx(whole[-1].cost)


def test_what_does_not_fit_all_caches_at_once_runs_in_waves() -> None:
    lengths = np.array([100.0] * 6)
    speed = Speed(0.01, 0.0001)
    plans = frontier(lengths, speed, max_actors=2, capacity=200)
    # six sequences, two at once on each of two actors: three full waves, two of them on one actor
    wave_s = 100 * 0.01 + 200 * 0.0001
    assert plans[-1].cost == pytest.approx(3 * wave_s) and plans[-1].time_s == pytest.approx(2 * wave_s)
    assert [len(group) for group in plans[-1].groups] == [4, 2]


def test_three_sequences_in_closed_form() -> None:
    """One actor: base · longest + per_seq · sum. As many actors as sequences: the longest alone; each by itself costs most."""
    lengths, speed = np.array([50.0, 10.0, 30.0]), Speed(0.02, 0.001)
    plans = frontier(lengths, speed, max_actors=3)
    assert plans[-1].time_s == plans[-1].cost == pytest.approx(0.02 * 50 + 0.001 * 90)
    assert plans[0].time_s == pytest.approx(0.021 * 50)
    # the two shorter ones share an actor within the longest one's time, so nobody needs a third
    assert plans[0].cost == pytest.approx(0.021 * 50 + 0.02 * 30 + 0.001 * 40) and plans[0].actors == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lengths": []}, "not empty"),
        ({"lengths": [1.0, np.nan]}, "sequence 1"),
        ({"lengths": [1.0, np.inf]}, "sequence 1"),
        ({"lengths": [3.0, 0.0]}, "sequence 1"),
        ({"lengths": [[3.0, 1.0], [2.0, -1.0]]}, "sequence 1"),
        ({"lengths": np.ones((2, 2, 2))}, "shape"),
        ({"max_actors": 0}, "at least one actor"),
        ({"capacity": 150}, "sequence 1 needs 220"),
        ({"capacity": 0}, "above 0"),
        ({"prompts": [1.0]}, "one per sequence"),
        ({"prompts": -1.0}, "at least 0"),
        ({"price": 0.0}, "price"),
        ({"thin": 1.0}, "thin"),
        ({"transfer_s": -1.0}, "transfer_s"),
        ({"max_actors": None}, "max_actors"),
        ({"pools": [Pool(Speed(1, 1))]}, "not both"),
        ({"speed": None, "max_actors": None, "pools": []}, "no pools"),
        ({"speed": None, "max_actors": None, "pools": [Pool(Speed(1, 1), start_s=100, preempt_per_hour=36)]}, "never decode"),
        ({"speed": Speed(0.0, 0.0)}, "decode step"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: dict, words: str) -> None:
    given_arguments = {"lengths": [100.0, 200.0], "speed": Speed(0.01, 0.001), "max_actors": 2, "prompts": 20.0, **arguments}
    with pytest.raises(ValueError, match=words) as raised:
        frontier(**given_arguments)
    assert "\n" not in str(raised.value)
