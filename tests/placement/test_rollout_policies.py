from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from benchmarks.simulated.simulate_rollout import simulate_rollout
from placement.simulate.rollout import RolloutJob, cost_weight_of, make_policy
from placement.simulate.rollout.consolidate import Consolidate, CrudeMix, rebalance
from placement.simulate.rollout.global_cut import plan_cut
from placement.simulate.rollout.run_policy import Result, run
from placement.speed.decode_speed import Speed

BASE, PER_SEQ = 8.5e-3, 3e-5
SPEED = Speed(BASE, PER_SEQ)


def lengths_of(seed: int, n: int = 320, group: int = 8, median: float = 150.0, sigma: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """True lengths (n,) and scenarios (n, 32): log-normal, 65 % of the variance between prompts, which the forecast knows."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.normal(0, np.sqrt(0.65) * sigma, -(-n // group)), group)[:n]
    spread = np.sqrt(0.35) * sigma
    truth = np.maximum(1, np.round(median * np.exp(prompt + rng.normal(0, spread, n))))
    return truth, np.maximum(1, median * np.exp(prompt[:, None] + rng.normal(0, spread, (n, 32))))


def reference(truth: np.ndarray, scenarios: np.ndarray, cost_weight: float, cap: int, mix: bool) -> tuple[float, float]:
    """Both consolidations written down again, token phase by token phase, with plain lists: (time, actor-seconds)."""
    made = {i: 0.0 for i in range(len(truth))}
    clock = paid = 0.0
    while made:
        count = len(made)
        cap = m = max(1, min(cap, count, int(np.ceil((PER_SEQ * count / (cost_weight * BASE)) ** 0.5))))
        queue = list(made)
        if mix:
            expected = {}
            for i in queue:
                rest = [s - made[i] for s in scenarios[i] if s > made[i]]
                expected[i] = sum(rest) / len(rest) if rest else 0.15 * made[i] + 5
            queue.sort(key=expected.__getitem__, reverse=True)
            shares = [6 ** (k / max(m - 1, 1)) for k in range(m)]
            ends = [round(count * sum(shares[: k + 1]) / sum(shares)) for k in range(m)]
        else:
            ends = [sum(count // m + (k < count % m) for k in range(j + 1)) for j in range(m)]
        slowest = 0.0
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            group, spent = queue[begin:end], 0.0
            while group and spent < 0.1:
                step = BASE + PER_SEQ * len(group)
                tokens = min(min(truth[i] - made[i] for i in group), (0.1 - spent) / step)
                spent += tokens * step
                for i in group:
                    made[i] += tokens
                group = [i for i in group if truth[i] - made[i] > 1e-9]
            slowest, paid = max(slowest, spent), paid + spent
        clock += slowest
        made = {i: g for i, g in made.items() if truth[i] - g > 1e-9}
    return clock, paid


@pytest.mark.parametrize("cost_weight", [0.02, 0.1, 0.5])
@pytest.mark.parametrize(("kind", "mix"), [(Consolidate, False), (CrudeMix, True)])
def test_consolidation_is_the_reference(kind: type[Consolidate], mix: bool, cost_weight: float) -> None:
    truth, scenarios = lengths_of(1, n=160)
    job = RolloutJob(scenarios, SPEED, 12, prompts=np.zeros(160))
    result = run(truth, job, kind(job, cost_weight))
    assert (result.time_s, result.cost) == pytest.approx(reference(truth, scenarios, cost_weight, 12, mix), rel=1e-6)


def swept(policy: str, truth: np.ndarray, scenarios: np.ndarray, **more: float) -> list[Result]:
    return [
        simulate_rollout(truth, scenarios, SPEED, policy=policy, max_actors=12, prefer=p, **more)  # type: ignore[arg-type]
        for p in np.linspace(0, 1, 5)
    ]


@pytest.mark.parametrize("policy", ["random", "rlhfless-paper", "consolidate", "crude-mix"])
def test_prefer_sweeps_from_one_actor_to_many(policy: str) -> None:
    truth, scenarios = lengths_of(3)
    results = swept(policy, truth, scenarios)
    alone = SPEED.rollout_s(truth)
    assert results[0].time_s == pytest.approx(alone) and results[0].cost == pytest.approx(alone)
    bound = SPEED.step_s(1) * truth.max()
    assert results[-1].time_s - bound < 0.5 * (alone - bound)
    assert all(a.time_s >= b.time_s * 0.99 for a, b in itertools.pairwise(results))


def test_fixed_pays_for_everyone_until_the_end_and_random_does_not() -> None:
    truth, scenarios = lengths_of(4)
    fixed = simulate_rollout(truth, scenarios, SPEED, policy="fixed", max_actors=12)
    random = simulate_rollout(truth, scenarios, SPEED, policy="random", max_actors=12, prefer=1.0)
    assert fixed.cost == pytest.approx(12 * fixed.time_s)
    assert random.time_s == fixed.time_s and random.cost < fixed.cost


def test_the_global_cut_is_the_best_of_those_tried() -> None:
    """The predicted plan against running every threshold and destination for real, on lengths the forecast knows."""
    truth, _ = lengths_of(5)
    for prefer in (0.4, 0.6):
        job = RolloutJob(truth[:, None], SPEED, 12, prefer, prompts=np.zeros(len(truth)))
        cost_weight = cost_weight_of(job)
        chosen = plan_cut(job, cost_weight)
        made = run(truth, job, make_policy("global-cut", job))
        assert made.time_s == pytest.approx(chosen.time_s, rel=0.05) and made.cost == pytest.approx(chosen.cost, rel=0.08)
        for remaining in (0, 16, 64, 160):
            for actors in (1, 3, 6):
                policy = make_policy("global-cut", job)
                policy.cut = type(chosen)(remaining, actors, 0.0, 0.0)  # type: ignore[attr-defined]
                other = run(truth, job, policy)
                assert made.time_s + cost_weight * made.cost <= (other.time_s + cost_weight * other.cost) * 1.03


def test_the_paper_cuts_at_its_share() -> None:
    truth, scenarios = lengths_of(6)
    result = simulate_rollout(truth, scenarios, SPEED, policy="rlhfless-paper", max_actors=12, prefer=0.8)
    cuts = [step for step in result.decisions if step.moved]
    assert cuts and all("70% finished" in step.reason and step.closed for step in cuts)


def test_costly_moves_make_consolidation_move_only_what_balance_needs() -> None:
    truth, scenarios = lengths_of(7)
    free = simulate_rollout(truth, scenarios, SPEED, policy="consolidate", max_actors=12, prefer=0.7)
    dear = simulate_rollout(truth, scenarios, SPEED, policy="consolidate", max_actors=12, prefer=0.7, migrate_s=0.05)
    assert dear.moves < free.moves / 5
    actor = np.array([0] * 5 + [1] * 2 + [2] * 3)
    new = rebalance(actor, 2)
    assert sorted(np.bincount(new)[np.bincount(new) > 0]) == [5, 5] and (new != actor).sum() == 2


def front(results: list[Result]) -> np.ndarray:
    """(k, 2) of log cost and log time, the points no other beats, by cost ascending."""
    points = np.array(sorted((r.cost, r.time_s) for r in results))
    keep = points[:, 1] < np.r_[np.inf, np.minimum.accumulate(points[:, 1])[:-1]]
    return np.log(points[keep])


def excess(ours: list[Result], other: list[Result]) -> np.ndarray:
    """Log of ours over the other's time at equal cost, at 15 costs between the ends that both reach."""
    a, b = front(ours), front(other)
    at = np.linspace(max(a[0, 0], b[0, 0]) + 0.01, min(a[-1, 0], b[-1, 0]), 15)
    return np.interp(at, a[:, 0], a[:, 1]) - np.interp(at, b[:, 0], b[:, 1])


KNOBS = (0.0, 0.1, 0.22, 0.36, 0.6, 1.0)
SEEDS = 6


@functools.cache
def sweep(policy: str, seed: int, known: bool, charge: float) -> list[Result]:
    """Results of `policy` over KNOBS on one short rollout; not known: every prompt has another prompt's forecast."""
    truth, scenarios = lengths_of(20 + seed, n=96, sigma=0.7, median=60.0)
    if not known:
        scenarios = scenarios[np.random.default_rng(seed).permutation(96)]
    return [
        simulate_rollout(truth, scenarios, SPEED, policy=policy, max_actors=6, prefer=p, migrate_s=charge, start_s=charge) for p in KNOBS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rival", ["consolidate", "crude-mix", "rlhfless-paper"])
@pytest.mark.parametrize(("known", "charge"), [(True, 0.0), (False, 0.0), (True, 0.1)])
def test_ours_is_not_behind_on_the_mean_frontier(rival: str, known: bool, charge: float) -> None:
    """Mean over length sets (the longest response of one set is luck), at equal cost, everywhere both reach."""
    each = [excess(sweep("ours", seed, known, charge), sweep(rival, seed, known, charge)) for seed in range(SEEDS)]
    mean = np.mean(each, axis=0)
    assert mean.max() <= 0.02, mean.round(3)
    assert mean.mean() <= 0.01, mean.round(3)


def test_the_oracle_is_ahead_and_at_its_best_near_the_bound() -> None:
    truth, scenarios = lengths_of(30, n=96, median=60.0)
    for prefer in (0.2, 0.5):
        job = RolloutJob(scenarios, SPEED, 12, prefer, prompts=np.zeros(96))
        cost_weight = cost_weight_of(job)
        score = {
            policy: (lambda r: r.time_s + cost_weight * r.cost)(
                simulate_rollout(truth, scenarios, SPEED, policy=policy, max_actors=12, prefer=prefer)
            )
            for policy in ("oracle", "ours", "consolidate", "crude-mix", "rlhfless-paper", "global-cut")
        }
        assert score["oracle"] <= 1.005 * min(score.values())
    fastest = simulate_rollout(truth, scenarios, SPEED, policy="oracle", max_actors=12, prefer=1.0)
    assert fastest.time_s <= 1.01 * SPEED.step_s(1) * truth.max()


def test_ours_at_its_cheapest_is_one_actor() -> None:
    truth, scenarios = lengths_of(31, n=96)
    result = simulate_rollout(truth, scenarios, SPEED, policy="ours", max_actors=12, prefer=0.0)
    assert result.cost == pytest.approx(SPEED.rollout_s(truth), rel=0.02)
