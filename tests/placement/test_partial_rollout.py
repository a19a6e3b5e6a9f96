"""How many groups are begun with partial rollouts, against a simulation token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import Speed
from placement.scaling import partial_rollout
from placement.scaling.partial_rollout import SHARES, TRIED, StepCosts, choose_groups, choose_share, find_late, steady_step

pytestmark = pytest.mark.pure


def token_by_token(groups: np.ndarray, quota: int, share: float, bound: int, costs: StepCosts) -> tuple[float, float, float]:
    """The pipeline with one loop over decode steps, which stops as soon as a batch can be trained that leaves a feasible rest."""
    work: list[dict] = []
    begun, results = 0, []
    for step in range(bound + 1 + TRIED):
        while len(work) < math.ceil(quota * share):
            lengths = groups[begun % len(groups)]
            work.append({"left": list(lengths), "made": [0] * len(lengths), "ages": [], "until": step - costs.ahead + bound, "done": None})
            begun += 1
        seconds, decoded, drawn = 0.0, 0, {id(g): 0 for g in work}
        for g in work:
            for left, made in zip(g["left"], g["made"], strict=True):
                seconds += costs.speed.prefill_s * (costs.prompt_tokens + made) / costs.engines if left and made else 0.0
            if not any(g["left"]) and g["done"] is None:
                g["done"] = -1
        while True:
            complete = sorted((g for g in work if not any(g["left"])), key=lambda g: g["done"])
            chosen = first_feasible(work, complete, step, quota)
            if chosen is not None:
                break
            running = [(g, i) for g in work for i, left in enumerate(g["left"]) if left]
            context = sum(costs.prompt_tokens + g["made"][i] + 0.5 for g, i in running)
            seconds += costs.speed.base_s + (costs.speed.per_seq_s * len(running) + costs.speed.per_ctx_s * context) / costs.engines
            decoded += 1
            for g, i in running:
                g["left"][i], g["made"][i] = g["left"][i] - 1, g["made"][i] + 1
                drawn[id(g)] += 1
            for g in work:
                if not any(g["left"]) and g["done"] is None:
                    g["done"] = decoded
        for g in work:
            g["ages"].append((step, drawn[id(g)]))
            g["done"] = -1 if g["done"] is not None else None
        older = min(1.0, costs.learn_s / seconds) if costs.ahead and seconds else float(costs.ahead)
        tokens = [(step - at + older, n) for g in chosen for at, n in g["ages"]]
        lag = sum(age * n for age, n in tokens) / sum(n for _, n in tokens)
        work = [g for g in work if not any(g is c for c in chosen)]
        step_s = max(seconds, costs.learn_s) if costs.ahead else seconds + costs.learn_s
        results.append((step_s, costs.engines * seconds + costs.learn_slots * costs.learn_s, lag))
    return tuple(np.mean(results[-TRIED:], axis=0))


def first_feasible(work: list[dict], complete: list[dict], step: int, quota: int) -> list[dict] | None:
    """The urgent ones of the complete groups that must be trained now, then the first complete ones."""
    chosen: list[dict] = []
    for g in sorted(complete, key=lambda g: g["until"]):
        rest = [o["until"] for o in work if not any(o is c for c in chosen)]
        if len(chosen) < quota and must_take(rest, step, quota - len(chosen), quota) and g["until"] == min(rest):
            chosen.append(g)
    for g in complete:
        if len(chosen) < quota and not any(g is c for c in chosen):
            chosen.append(g)
    rest = [o["until"] for o in work if not any(o is c for c in chosen)]
    return chosen if len(chosen) == quota and not find_late(rest, step + 1, quota) else None


def must_take(until: list[int], step: int, room: int, quota: int) -> bool:
    """Whether the most urgent group has to be trained now: without it, `room` groups of the others taken now leave one too late."""
    others = sorted(until)[1:]
    return bool(find_late([min(until), *others[room:]], step + 1, quota))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=2), min_size=3, max_size=6),
    st.sampled_from([(1, 1.5, False), (1, 2.0, False), (2, 1.0, True), (1, 1.0, True), (0, 1.0, False)]),
)
def test_a_step_takes_what_the_loop_over_tokens_takes(lengths: list[list[int]], case: tuple[int, float, bool]) -> None:
    bound, share, ahead = case
    costs = StepCosts(Speed(0.01, 1e-3, 1e-5, 1e-4), engines=2, prompt_tokens=7, learn_s=0.05, learn_slots=1, ahead=ahead)
    groups = np.array(lengths)
    found = steady_step(groups, 2, share, bound, costs)
    step_s, slot_s, lag = token_by_token(groups, 2, share, bound, costs)
    assert (found.step_s, found.slot_s, found.lag) == pytest.approx((step_s, slot_s, lag))


def long_tailed(seed: int = 0) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).geometric(1 / 100, (64, 4)), 1000)


@pytest.mark.parametrize("prefer", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_choice_is_the_best_of_all_shares_and_bounds(prefer: float, ahead: bool) -> None:
    costs = StepCosts(Speed(5e-3, 1e-5, 0.0, 1e-4), engines=2, prompt_tokens=20, learn_s=0.5, learn_slots=2, ahead=ahead)
    chosen = choose_share(long_tailed(), 8, 2, costs, prefer, stale_cost=0.02)
    base = chosen.frontier[0]
    scores = {}
    for bound in (1, 2):
        for share in (s for s in SHARES if s <= bound + (not ahead)):
            point = steady_step(long_tailed(), 8, share, bound, costs)
            scores[share] = min(
                scores.get(share, math.inf),
                (prefer * point.step_s / base.step_s + (1 - prefer) * point.slot_s / base.slot_s) * math.exp(0.02 * point.lag),
            )
    assert scores[chosen.share] == min(scores.values())
    assert [point.bound for point in chosen.frontier] == [0, 1, 2] and base.lag == 0


def test_long_tails_are_worth_a_lag_and_equal_lengths_or_stale_tokens_are_not() -> None:
    costs = StepCosts(Speed(5e-3, 1e-5, 0.0, 1e-5), engines=2, prompt_tokens=20, learn_s=0.5, learn_slots=2)
    chosen = choose_share(long_tailed(), 8, 2, costs, prefer=1.0)
    assert chosen.share > 1 and chosen.frontier[1].step_s < 0.9 * chosen.frontier[0].step_s
    assert "bound 2: 0." in chosen.reason
    busy = replace(costs, speed=Speed(1e-6, 1e-3))  # otherwise twice the responses in one rollout are worth a lag already
    assert choose_share(np.full((64, 4), 100), 8, 2, busy, prefer=1.0, stale_cost=1e-3).share == 1
    assert choose_share(long_tailed(), 8, 2, costs, prefer=1.0, stale_cost=5.0).share == 1


def test_a_step_of_many_groups_asks_a_few_times_who_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a group that becomes complete, and groups looked up in a list, took 14 s for 512 prompts and a bound of 4."""
    asked: list[int] = []

    def counting(last_steps: np.ndarray, completed: np.ndarray, *more: int) -> list[int] | None:
        asked.append(len(completed))
        return choose_groups(last_steps, completed, *more)

    monkeypatch.setattr(partial_rollout, "choose_groups", counting)
    groups = np.random.default_rng(0).lognormal(6, 0.8, (512, 2)).round()
    steady_step(groups, 256, 3.0, 4, StepCosts(Speed(0.01, 1e-4), engines=8, prompt_tokens=100, learn_s=20, learn_slots=8))
    assert len(asked) <= (4 + 1 + TRIED) * (math.log2(3 * 256 - 256) + 2)
