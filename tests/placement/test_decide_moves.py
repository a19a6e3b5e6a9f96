from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.forecast.scenarios import Scenarios
from placement.migration.decide_moves import CAUTION, LiveState, MoveSearch, Settings, cut_at_share, decide_moves, relabel, square_root_law
from placement.speed.decode_speed import Speed

SPEED = Speed(8.5e-3, 3e-5)


def state(n: int = 120, seed: int = 0, *, actors: int = 6, draws: int = 64) -> LiveState:
    """Sequences of different lengths under way on random actors."""
    rng = np.random.default_rng(seed)
    left = np.exp(np.log(120) + rng.normal(0, 0.5, n)[:, None] + rng.normal(0, 0.4, (n, draws))).round()
    return LiveState(left, np.full(n, 60.0), rng.integers(0, actors, n), tuple(range(actors)))


def test_the_seconds_of_actors_are_those_of_the_speed() -> None:
    live, speed = state(40), Speed(8.5e-3, 3e-5, 1e-7)
    found = MoveSearch(live, speed, Settings(0.1, 8, 0.5)).seconds(live.actor)
    for a in range(6):
        mine = np.flatnonzero(live.actor == a)
        assert found[a].mean() == pytest.approx(speed.rollout_s(live.left[mine], live.context[mine]))
    assert not found[6:].any()


def test_each_actor_has_its_own_speed_and_price() -> None:
    """Between two kinds of engines a move counts with the speeds of both, and the cost with both prices."""
    live, slow = state(40, actors=2), Speed(2e-2, 1e-4, 1e-7)
    given = Settings(0.1, 4, 0.5, 0.1, speeds=(SPEED, slow, SPEED, slow), prices=(1.0, 0.3, 1.0, 0.3))
    search = MoveSearch(live, SPEED, given)
    found = search.seconds(live.actor)
    for a, speed in ((0, SPEED), (1, slow)):
        mine = np.flatnonzero(live.actor == a)
        assert found[a].mean() == pytest.approx(speed.rollout_s(live.left[mine], live.context[mine]))
    assert search.score(found) == pytest.approx(found.max(0) + 0.1 * (found[0] + 0.3 * found[1]))
    moved = np.flatnonzero(live.actor == 1)[:1]
    after = search.changed(found, moved, 0)
    placed = live.actor.copy()
    placed[moved] = 0
    np.testing.assert_allclose(after, search.seconds(placed))
    alone = MoveSearch(LiveState(live.left[moved], live.context[moved], np.array([1]), (0, 1)), SPEED, given).seconds(np.array([0]))
    assert alone[0] == pytest.approx(SPEED.base_s * live.left[moved[0]] + 0.5 + SPEED.per_seq_s * live.left[moved[0]] + 0.1), (
        "its tokens at the new speed, and the pause"
    )


def test_a_straggler_leaves_a_slow_kind_of_engine_for_a_fast_one() -> None:
    live = LiveState(np.full((8, 20), 500.0), np.full(8, 50.0), np.array([0, 0, 0, 0, 1, 1, 1, 1]), (0, 1))
    alike = decide_moves(live, SPEED, Settings(0.01, 2, 0.05))
    apart = decide_moves(live, SPEED, Settings(0.01, 2, 0.05, speeds=(Speed(5e-2, 1e-4), SPEED)))
    assert (alike.actor == live.actor).all() and (apart.actor == 1).all()


@given(st.integers(0, 1000), st.sampled_from([0.01, 0.1]), st.sampled_from([0.0, 0.3]), st.floats(0.003, 3.0))
@settings(deadline=None, max_examples=20)
def test_changes_are_judged_as_whole_placements_are(seed: int, pause_s: float, start_s: float, cost_weight: float) -> None:
    live = state(30, seed, actors=4)
    search = MoveSearch(live, SPEED, Settings(cost_weight, 6, pause_s, pause_s / 4, start_s))
    now = search.seconds(live.actor)
    for moved, target, _ in search.changes(now)[:20]:
        placed = live.actor.copy()
        placed[moved] = target
        np.testing.assert_allclose(search.changed(now, moved, target), search.seconds(placed))


@given(st.integers(0, 1000), st.floats(0.003, 3.0))
@settings(deadline=None, max_examples=20)
def test_what_is_moved_pays_in_nearly_all_draws(seed: int, cost_weight: float) -> None:
    live, given = state(60, seed, actors=4), Settings(cost_weight, 5, 0.02, 0.001, 0.1)
    moves = decide_moves(live, SPEED, given)
    search = MoveSearch(live, SPEED, given)
    before, after = search.seconds(live.actor), search.seconds(moves.actor)
    saved = search.score(before) - search.score(after)
    assert set(moves.actor.tolist()) <= set(range(5)) and moves.reason
    if (moves.actor == live.actor).all():
        assert moves.time_saved_s == 0
    else:
        cost_saved = (before - after).sum(0).mean()
        assert np.mean(saved <= 0) <= 4 * CAUTION and saved.mean() == pytest.approx(moves.time_saved_s + cost_weight * cost_saved)


def test_dear_moves_are_fewer_and_very_dear_ones_are_not_made() -> None:
    live = state(300, 5)
    counts = [(decide_moves(live, SPEED, Settings(0.05, 12, pause_s)).actor != live.actor).sum() for pause_s in (0.01, 0.3, 60.0)]
    assert counts[0] >= counts[1] >= counts[2] == 0 and counts[0] > 0, counts


def test_a_straggler_leaves_its_crowd_only_if_it_is_known_to_be_one() -> None:
    """One of sixteen on a slow engine is far longer than the others, in each draw or in every fifth one."""
    slow, rng = Speed(0.01, 0.01), np.random.default_rng(0)
    left = np.full((16, 50), 100.0) + rng.integers(0, 5, (16, 50))
    left[3] = 900.0
    live = LiveState(left, np.full(16, 50.0), np.zeros(16, int), (0, 1))
    moves = decide_moves(live, slow, Settings(0.01, 2, 0.5))
    assert moves.actor[3] == 1 and moves.time_saved_s > 1
    rare = left.copy()
    rare[3] = np.where(np.arange(50) % 5, 100.0, 900.0)
    alone = decide_moves(replace(live, left=rare), slow, Settings(0.01, 2, 30.0))
    assert (alone.actor == 0).all()


def test_the_work_of_taking_over_contexts_counts() -> None:
    crowd = LiveState(np.full((16, 8), 100.0), np.full(16, 600.0), np.zeros(16, int), (0, 1))
    for work_s, moved in ((0.001, True), (20.0, False)):
        assert bool((decide_moves(crowd, Speed(0.01, 0.01), Settings(0.01, 2, 0.01, work_s)).actor == 1).any()) == moved


def test_without_information_the_law_decides_and_loads_are_even() -> None:
    n, weight = 200, 0.2
    left = np.random.default_rng(0).permuted(np.tile(np.linspace(50, 400, 64), (n, 1)), axis=1)
    actor = decide_moves(LiveState(left, np.zeros(n), np.full(n, -1)), SPEED, Settings(weight, 16, 0.1)).actor
    used = np.bincount(actor)
    assert len(used) == square_root_law(n, SPEED.per_seq_s / SPEED.base_s, weight) and np.ptp(used) <= 1


def test_the_likely_long_sit_on_lightly_loaded_actors() -> None:
    n = 200
    left = np.repeat([2000.0, 100.0], [10, 190])[:, None] * np.exp(np.random.default_rng(0).normal(0, 0.1, (n, 32)))
    actor = decide_moves(LiveState(left, np.zeros(n), np.full(n, -1)), Speed(1e-3, 1e-4), Settings(0.3, 8, 0.1)).actor
    size = np.bincount(actor)
    assert size[actor[:10]].mean() < 0.5 * size[actor[10:]].mean()


def test_the_last_few_are_merged_when_actors_are_dear_and_kept_apart_when_time_is() -> None:
    n = 4
    live = LiveState(np.random.default_rng(0).integers(200, 400, (n, 32)).astype(float), np.full(n, 300.0), np.arange(n), tuple(range(n)))
    dear = Settings(1.0, 8, 0.05)
    merged = decide_moves(live, SPEED, dear)
    search = MoveSearch(live, SPEED, dear)
    assert len(np.unique(merged.actor)) == 1 and search.seconds(merged.actor).sum() < search.seconds(live.actor).sum()
    apart = decide_moves(live, SPEED, Settings(1e-5, 8, 0.05))
    assert (apart.actor == live.actor).all()


def test_the_same_progress_gives_the_same_moves() -> None:
    one, two = (decide_moves(state(150, 7), SPEED, Settings(0.05, 12, 0.02)) for _ in range(2))
    assert (one.actor == two.actor).all() and one.reason == two.reason


def test_nothing_left_to_move_is_an_error() -> None:
    with pytest.raises(ValueError, match="every sequence has finished"):
        decide_moves(LiveState(np.zeros((0, 4)), np.zeros(0), np.zeros(0, int)), SPEED, Settings(0.1, 4))


def test_forecasts_in_the_wrong_order_are_pooled() -> None:
    """Half of the responses have ended. Where they were forecast short, the others keep their forecasts; else all look alike."""
    rng = np.random.default_rng(0)
    said = np.exp(np.linspace(4, 6, 64))
    draws = Scenarios.from_matrix(said[:, None] * np.exp(rng.normal(0, 0.2, (64, 32))))
    for truth, ordered in ((said, True), (rng.permutation(said), False)):
        finished = truth < np.median(truth)
        left = draws.left(np.minimum(truth, np.median(truth)), finished)[~finished].mean(1)
        assert (np.corrcoef(left, said[~finished])[0, 1] > 0.8) == ordered
    few = draws.left(np.full(64, 5.0), np.arange(64) >= 62)
    assert abs(np.corrcoef(few[:62].mean(1), said[:62])[0, 1]) < 0.5, "two ended responses show nothing"
    assert draws.left(np.full(64, 90.0), np.zeros(64, bool), limit=100.0).max() == 10


def test_the_papers_rule_cuts_at_its_share_into_free_slots() -> None:
    begun = np.array([10, 10])
    assert cut_at_share(np.repeat([0, 1], [3, 6]), begun, 0.7).tolist() == [1] * 9
    assert cut_at_share(np.repeat([0, 1], [3, 6]), begun, 0.71).tolist() == [0] * 3 + [1] * 6
    assert cut_at_share(np.repeat([0, 1], [3, 8]), begun, 0.7).tolist() == [0] * 3 + [1] * 8  # two free slots for three sequences


def test_names_follow_the_sequences() -> None:
    now = np.array([3, 3, 3, 1, 1, 0])
    assert relabel(np.array([0, 0, 0, 1, 1, 1]), now, (0, 1, 3), 5).tolist() == [3, 3, 3, 1, 1, 1]
    assert relabel(np.array([0, 1, 2, 2, 2, 2]), np.full(6, -1), (), 5).tolist() == [0, 1, 2, 2, 2, 2]
