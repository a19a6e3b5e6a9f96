"""What a rollout asks of the planner and what it makes of the answer."""

from __future__ import annotations

import numpy as np
import pytest

from placement.measurements.term import Term
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.migration_policy import MigrationPolicy
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import EngineStep, Request

SPEED = Speed(base_s=0.01, per_seq_s=1e-5)


def progressed(owner: list[int], length: list[int], finished: list[int]) -> TokenLog:
    token_log = TokenLog([Request(key, (1,) * 10, key, 4096, 1.0) for key in range(len(owner))])
    token_log.owner[:], token_log.length[:] = owner, length
    token_log.finished[finished] = True
    return token_log


def forecasts(lengths: list[float], draws: int = 64, spread: float = 0.2) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal((len(lengths), draws))
    return np.array(lengths)[:, None] * np.exp(spread * noise)


def begun(rule: str, lengths: list[float], second: float = 1.0, tau: float = 0.7) -> MigrationPolicy:
    migration = MigrationPolicy(rule, tau)
    migration.prepare(forecasts(lengths), SPEED, second)
    return migration


def test_tau_moves_the_rest_of_an_engine_once_that_share_has_finished() -> None:
    """Engines 3, 5 and 8 began with four each; three of engine 5's have finished, and one of engine 8's has made room."""
    owner = [3] * 4 + [5] * 4 + [8] * 4
    state = progressed(owner, [50] * 12, [4, 5, 6, 8])
    moves = begun("tau", [100.0] * 12).decide(state, [3, 5, 8], EngineSteps())
    assert [(w.requests.tolist(), w.source, w.target) for w in moves.moves] == [([7], 5, 8)]
    assert begun("tau", [100.0] * 12, tau=0.9).decide(state, [3, 5, 8], EngineSteps()).moves == ()


def test_engines_of_a_fast_pool_get_the_tail_of_a_slow_one() -> None:
    """Engine 1 is four times as fast. With one speed for both, nothing would be gained by a move."""
    state = progressed([0] * 4 + [1] * 4, [10] * 8, [])
    for kinds, target in ((lambda _: (SPEED, 1.0), None), (lambda number: (Speed(SPEED.base_s / (1, 4)[number], SPEED.per_seq_s), 1.0), 1)):
        migration = begun("auto", [400.0] * 8, second=1e6)
        migration.kind_of = kinds
        moves = migration.decide(state, [0, 1], EngineSteps()).moves
        assert {move.target for move in moves} == ({target} if target else set())


def test_auto_consolidates_the_tail_only_when_leases_cost() -> None:
    owner = [0] * 8 + [1] * 8
    state = progressed(owner, [100] * 16, [*range(7), *range(8, 15)])
    cheap = begun("auto", [150.0] * 16, second=0.2).decide(state, [0, 1], EngineSteps())
    assert len(cheap.moves) == 1 and len(cheap.moves[0].requests) == 1
    assert {cheap.moves[0].source, cheap.moves[0].target} == {0, 1} and cheap.reason
    assert begun("auto", [150.0] * 16, second=1e6).decide(state, [0, 1], EngineSteps()).moves == ()


def test_auto_spreads_requests_to_an_idle_engine() -> None:
    slow = Speed(base_s=0.01, per_seq_s=0.01)
    migration = MigrationPolicy("auto", 0.7)
    migration.prepare(forecasts([1000.0] * 16), slow, 100.0)
    moves = migration.decide(progressed([0] * 16, [10] * 16, []), [0, 1], EngineSteps())
    assert moves.moves and {(w.source, w.target) for w in moves.moves} == {(0, 1)} and moves.time_saved_s > 1
    assert 4 <= sum(len(w.requests) for w in moves.moves) <= 12


def test_an_expensive_move_is_not_made() -> None:
    owner = [0] * 8 + [1] * 8
    state = progressed(owner, [100] * 16, [*range(7), *range(8, 15)])
    migration = begun("auto", [150.0] * 16, second=0.2)
    for _ in range(8):
        migration.observe(110, 60.0)
    assert migration.decide(state, [0, 1], EngineSteps()).moves == ()


def test_many_moves_must_pay_for_computing_their_contexts_again() -> None:
    """All of sixteen long contexts on one engine: to take half of them away pays if prefill costs nothing, and not if every token
    of them costs as much as a decode step."""
    slow = Speed(base_s=0.01, per_seq_s=0.01)
    for token_s, pays in ((1e-5, True), (0.16, False)):
        migration = MigrationPolicy("auto", 0.7)
        migration.prepare(forecasts([1000.0] * 16), slow, 100.0, token_s)
        moves = migration.decide(progressed([0] * 16, [600] * 16, []), [0, 1], EngineSteps())
        assert bool(moves.moves) == pays and moves.reason


def test_without_another_engine_the_planner_is_not_called() -> None:
    migration = begun("auto", [150.0] * 4)
    assert migration.decide(progressed([0] * 4, [9] * 4, []), [0], EngineSteps()).moves == ()
    assert migration.decide(progressed([0, 0, 1, 2], [9] * 4, []), [0, 1], EngineSteps()).moves == ()  # engine 2 is not there yet
    assert migration.decide(progressed([0, 0, 1, 1], [9] * 4, [0, 1, 2, 3]), [0, 1], EngineSteps()).moves == ()


def test_the_fitted_speed_is_scaled_to_the_newest_steps() -> None:
    migration = begun("auto", [100.0])
    old = [EngineStep(4, 4, 0, 9.0)] * 100
    new = [EngineStep(4, 4, 0, 3 * SPEED.step_s(4)), EngineStep(4, 400, 0, 50.0)] * 64  # prefill shows nothing of decoding
    assert migration._slowdown(EngineSteps(old + new)) == pytest.approx(3) and migration._slowdown(EngineSteps()) == 1


def test_each_context_takes_the_faster_method_and_requests_without_tokens_are_computed() -> None:
    migration = MigrationPolicy("auto", 0.7, carries=True)
    migration.prefill, migration.pages = Term(0.01, 1e-4), Term(0.05, 1e-6)
    state = progressed([0] * 4, [0, 100, 1000, 2000], [])
    state.prompt[0] = 5000
    moves = migration.choose_methods(np.arange(4), state, 0, 1, "test")
    assert [(w.requests.tolist(), w.how) for w in moves] == [([0, 1], "prefill"), ([2, 3], "pages")]
    assert migration._work_s(np.array([100.0, 1000.0])).sum() == pytest.approx(1e-6 * 1000)  # nothing is known of prefill yet
    without = MigrationPolicy("auto", 0.7)
    assert [w.how for w in without.choose_methods(np.arange(4), state, 0, 1, "test")] == ["prefill"]


def test_measured_moves_decide_the_method() -> None:
    """Pages become faster than their seed predicts, then prefill once pages take long. Both wait as long for their engines' steps."""
    migration = MigrationPolicy("auto", 0.7, carries=True)
    context = np.array([50.0, 400.0, 3000.0] * 8)
    assert migration._prefers_pages(np.array([200])).tolist() == [False]
    for tokens in context:
        migration.observe(tokens, 0.5 + 1e-3 * tokens, "prefill")
    assert migration._prefers_pages(np.array([200])).tolist() == [True]
    for tokens in context:
        migration.observe(tokens, 4.0, "pages")
    assert migration._prefers_pages(np.array([200, 20_000])).tolist() == [False, True]
    restored = MigrationPolicy("auto", 0.7, carries=True)
    restored.restore(migration.state())
    np.testing.assert_array_equal(restored._predict(context), migration._predict(context))
    MigrationPolicy("auto", 0.7).restore(migration.state())  # of a run whose engines cannot copy pages any more
    slow = MigrationPolicy("auto", 0.7, carries=True)
    for tokens in context:
        slow.observe(tokens, 10 * slow.prefill.seed @ (1, tokens), "prefill")
    assert slow._prefers_pages(np.array([100, 3000])).tolist() == [False, True], "pages are assumed to take ten times as long too"


def test_a_failed_decision_ends_only_the_moves_of_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    autoscaler = Autoscaler(Recipe.parse({"prompts": {"task": "sort"}, "reward": {"function": "task"}}), SPEED)
    migration = MigrationPolicy("auto", 0.7, safely=autoscaler.safely)
    slow = Speed(0.001, 0.002)
    migration.prepare(forecasts([1000.0] * 16), slow, 100.0)
    crowd = progressed([0] * 16, [10] * 16, [])
    with monkeypatch.context() as patched:
        patched.setattr(migration, "_best", lambda *_: 1 / 0)
        assert not migration.decide(crowd, [0, 1], EngineSteps()).moves
    assert not migration.decide(crowd, [0, 1], EngineSteps()).moves, "not asked again in this rollout"
    assert autoscaler.troubles == ["deciding on moves failed (ZeroDivisionError: division by zero)"]
    migration.prepare(forecasts([1000.0] * 16), slow, 100.0)
    assert migration.decide(crowd, [0, 1], EngineSteps()).moves


def test_the_price_of_a_pause_is_what_nine_in_ten_stay_below() -> None:
    migration = begun("auto", [150.0] * 16)
    context = np.array([100.0, 400.0])
    assert (migration._pause_s(context) > migration._predict(context)[0]).all(), "nothing is known of the seed's errors"
    for step in range(10):
        migration.observe(100.0, 3.0 if step % 5 == 4 else 0.2)
        migration._predict(context)  # a fit between two steps
    assert migration._pause_s(context)[0] > 1.5 > migration._predict(context)[0, 0]
