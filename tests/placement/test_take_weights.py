"""When engines take the weights of the update beside them, against a simulation token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import Speed
from placement.scaling.resize_policy import MIN_SAVING
from placement.scaling.take_weights import PauseCosts, compare_points, decide_weights

pytestmark = pytest.mark.pure

COSTS = PauseCosts(Speed(0.01, 1e-3, 1e-6, 1e-4), 2, 4, 1, 1, 0.1, True, 3.0, 1.0, 1000.0, 0.05)


def token_by_token(left: list[int], context: list[int], horizon: int, taken: int, engines: int, costs: PauseCosts) -> float:
    """The cost of the rest if all responses stop after `taken` tokens for new weights, and go on with so many engines."""
    speed, cost, old_tokens = costs.speed, 0.0, 0
    made, now = [0] * len(left), costs.engines
    for token in range(horizon):
        if token == taken:
            unfinished = [i for i in range(len(left)) if made[i] < left[i]]
            again = sum(context[i] + made[i] for i in unfinished) * speed.prefill_s * costs.recomputes
            now = engines
            cost += (costs.value_per_s + now * costs.width) * (costs.pause_s + again / now)
        running = [i for i in range(len(left)) if made[i] < left[i]]
        read = sum(context[i] + made[i] + 0.5 for i in running)
        seconds = speed.base_s + (speed.per_seq_s * len(running) + speed.per_ctx_s * read) / now
        held = now * costs.width + (costs.learner_slots if token < taken else 0)
        cost += (costs.value_per_s + held) * seconds
        for i in running:
            made[i] += 1
            old_tokens += token < taken
    return cost + costs.stale_cost * costs.step_cost * old_tokens / costs.step_tokens


responses = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 300)), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(responses, st.data())
def test_no_time_to_take_the_weights_is_cheaper_than_the_chosen_one(rest: list[tuple[int, int]], data: st.DataObject) -> None:
    left, context = [tokens for tokens, _ in rest], [tokens for _, tokens in rest]
    horizon = data.draw(st.integers(0, max(left)))
    costs = replace(
        COSTS,
        engines=data.draw(st.integers(1, 3)),
        most_engines=data.draw(st.integers(1, 5)),
        width=data.draw(st.integers(1, 2)),
        learner_slots=data.draw(st.integers(0, 3)),
        pause_s=data.draw(st.floats(0.0, 0.2)),
        recomputes=data.draw(st.booleans()),
        value_per_s=data.draw(st.floats(0.1, 20.0)),
        step_tokens=data.draw(st.floats(10.0, 500.0)),
        stale_cost=data.draw(st.floats(0.0, 0.5)),
    )
    tokens, cost, *_ = compare_points(np.array(left, float), np.array(context, float), float(horizon), costs)
    most = max(costs.engines, min(costs.most_engines, len(left)))
    wanted = {
        taken: min(token_by_token(left, context, horizon, taken, m, costs) for m in range(costs.engines, most + 1))
        for taken in {0, *(x for x in left if x < horizon), horizon}
    }
    assert sorted(wanted) == tokens.tolist()
    np.testing.assert_allclose(cost, [wanted[x] for x in sorted(wanted)], rtol=1e-9)
    decided = decide_weights(np.array(left, float), np.array(context, float), float(horizon), costs)
    if wanted[0] - min(wanted.values()) < MIN_SAVING * costs.step_cost * (1 - 1e-9):
        assert decided.wait_s == 0 and decided.reason.startswith("new weights now: ")
    else:
        to_end = min(wanted, key=wanted.__getitem__) == horizon
        assert decided.wait_s > 0 and decided.reason.startswith("old weights to the end of the rollout" if to_end else "old weights for ")


def test_the_reason_names_what_is_gained() -> None:
    left, context = np.array([3.0, 4.0, 40.0]), np.full(3, 200.0)
    soon = decide_weights(left[:2], context[:2], 4.0, replace(COSTS, step_tokens=100.0))
    assert soon.wait_s == pytest.approx(0.045, abs=0.01)
    assert soon.reason.startswith("old weights to the end of the rollout in 0.0") and "of a step's cost: with a pause 0." in soon.reason
    late = decide_weights(left, context, 40.0, replace(COSTS, recomputes=False, stale_cost=1.0))
    assert late.wait_s == 0 and late.reason.startswith("new weights now: ") and late.reason.endswith(" s on 2 without")
    prefill = replace(COSTS, speed=replace(COSTS.speed, prefill_s=2e-3), pause_s=0.0, engines=1, most_engines=1, value_per_s=1.0)
    between = decide_weights(
        np.array([2.0, 2.0, 2.0, 400.0]), np.array([300.0, 300.0, 300.0, 10.0]), 400.0, replace(prefill, stale_cost=9.0)
    )
    assert "until 3 of 4 responses have ended" in between.reason and 0 < between.wait_s < 0.1


def test_many_responses_are_compared_at_a_few_times() -> None:
    left = np.random.default_rng(0).uniform(1, 1000, 2000)
    tokens, *_ = compare_points(left, np.full(2000, 100.0), 900.0, COSTS)
    assert len(tokens) == 66 and (np.diff(tokens) > 0).all() and tokens[-1] == 900


def pipeline(costs: PauseCosts, update_s: float, waits: bool, steps: int = 40) -> tuple[float, float, float]:
    """Seconds, slot-seconds and share of old tokens of a step whose rollout begins beside an update and goes on after it.

    It has 16 groups of 8 responses, log-normal with median 300. Lengths are forecast with an error of 40 %. Engines go on as
    `decide_weights` says, or take the weights of each update at once.
    """
    rng, speed, found = np.random.default_rng(0), costs.speed, []
    for _ in range(steps):
        log = np.sqrt(0.65) * rng.standard_normal((16, 1)) + np.sqrt(0.35) * rng.standard_normal((16, 8))
        lengths = np.clip(np.exp(np.log(300) + 0.7 * log), 8, 1024).ravel()
        forecast, made = lengths * np.exp(0.4 * rng.standard_normal(128)), np.zeros(128)

        def decode(engines: int, seconds: float, lengths: np.ndarray = lengths, made: np.ndarray = made) -> float:
            spent = 0.0
            while (live := made < lengths).any() and spent < seconds:
                made += np.minimum(lengths - made, 2.0)
                spent += 2 * (speed.base_s + speed.per_seq_s * int(live.sum()) / engines)
            return spent

        seconds = decode(costs.engines, update_s)
        cost, step_s = costs.engines * seconds + costs.learner_slots * max(seconds, update_s), max(seconds, update_s)
        while (live := made < lengths).any():
            left = np.maximum(forecast, 1.1 * made)[live] - made[live]
            decided = decide_weights(left, 50 + made[live], left.max(), costs) if waits else None
            if decided is None or not decided.wait_s:
                break
            spent = decode(costs.engines, max(0.05, decided.wait_s))
            step_s, cost = step_s + spent, cost + (costs.engines + costs.learner_slots) * spent
        old = made.sum() / lengths.sum()
        if live.any():
            again_s = costs.pause_s + speed.prefill_s * float((50 + made)[live].sum()) / costs.most_engines
            spent = again_s + decode(costs.most_engines, np.inf)
            step_s, cost = step_s + spent, cost + costs.most_engines * spent
        found.append((step_s, cost, old))
    return tuple(np.mean(found, axis=0))  # type: ignore[return-value]


@pytest.mark.parametrize(("pause_s", "learner", "time", "cost"), [(1.0, 1, 0.92, 0.92), (0.3, 1, 0.998, 0.998), (1.0, 4, 0.99, 0.99)])
def test_waiting_saves_most_with_long_pauses_and_a_small_learner(pause_s: float, learner: int, time: float, cost: float) -> None:
    speed = Speed(8.5e-3, 3e-5, 0.0, 3.3e-5)
    costs = PauseCosts(speed, 8 - learner, 8, 1, learner, pause_s, True, 8.0, 10.0, 46_000.0, 0.05)
    always, decided = (pipeline(costs, 8.0, waits) for waits in (False, True))
    assert decided[0] <= time * always[0] and decided[1] <= cost * always[1] and decided[2] >= always[2]
