from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from benchmarks.simulated.simulate_rollout import simulate_rollout
from placement.forecast.remaining_length import (
    SHARE_PRIOR,
    SHARES,
    Forecast,
    RemainingLengths,
    calibrate,
    observed_uninformative_share,
    predict_remaining,
)
from placement.migration.decide_moves import LiveState, Settings, cut_at_share, decide_moves, relabel, remaining_lengths
from placement.migration.load_split import best_split, estimate_split, estimate_splits
from placement.speed.decode_speed import Speed

SPEED = Speed(8.5e-3, 3e-5)


def state(
    n: int = 200, seed: int = 0, *, progress: float = 60.0, actors: int = 6, spread: float = 0.4, between: float = 0.4
) -> tuple[LiveState, np.ndarray]:
    """A rollout under way: every sequence has made `progress` tokens or ended before. Returns it and the true lengths."""
    rng = np.random.default_rng(seed)
    mean = np.log(120) + rng.normal(0, between, n)
    truth = np.exp(mean + rng.normal(0, spread, n))
    forecast = Forecast(mean, np.full(n, spread))
    finished = truth <= progress
    actor = rng.integers(0, actors, n)
    return LiveState(forecast, np.minimum(truth, progress), finished, actor, tuple(range(actors))), truth


def test_calibration_recovers_a_biased_forecast_from_a_censored_half() -> None:
    rng = np.random.default_rng(1)
    said = rng.normal(5.0, 0.5, 4000)
    truth = 0.3 + 5.0 + 0.6 * (said - 5.0) + 1.5 * 0.3 * rng.normal(size=4000)  # log lengths
    tokens = np.exp(np.minimum(truth, 5.2))
    known = calibrate(Forecast(said, np.full(4000, 0.3)), tokens, truth <= 5.2, uninformative_share=0.0)
    slope, shift = np.polyfit(said, known.mean_log, 1)
    assert slope == pytest.approx(0.6, abs=0.05)
    assert shift + 5.0 * slope == pytest.approx(5.3, abs=0.03)
    assert known.sd_log.mean() == pytest.approx(0.45, abs=0.02)


def test_calibration_is_not_bent_by_a_few_freaks() -> None:
    rng = np.random.default_rng(2)
    said = rng.normal(5.0, 0.4, 2000)
    truth = said + 0.3 * rng.normal(size=2000)
    truth[:60] = said[:60] - 2.5  # answers that broke off
    plain, robust = (
        calibrate(Forecast(said, np.full(2000, 0.3)), np.exp(truth), np.ones(2000, bool), uninformative_share=share) for share in (0.0, 0.1)
    )
    assert plain.sd_log.mean() > 0.4 and robust.sd_log.mean() == pytest.approx(0.3, abs=0.03)


def test_nothing_seen_leaves_the_forecast_as_it_is() -> None:
    forecast = Forecast(np.full(3, 4.0), np.full(3, 0.5))
    assert calibrate(forecast, np.zeros(3), np.zeros(3, bool)) is forecast


def test_scenarios_of_one_spread_are_not_told_apart_by_noise() -> None:
    rng = np.random.default_rng(3)
    alike = Forecast.from_scenarios(np.exp(rng.normal(5, 0.35, (500, 16))))
    assert alike.sd_log.mean() == pytest.approx(0.35, abs=0.02) and alike.sd_log.std() < 0.02
    sharp = np.repeat([0.1, 0.8], 250)
    apart = Forecast.from_scenarios(np.exp(rng.normal(5, sharp[:, None], (500, 64))))
    assert apart.sd_log[:250].mean() == pytest.approx(0.1, abs=0.05) and apart.sd_log[250:].mean() == pytest.approx(0.8, abs=0.05)


def test_survival_and_criticality_are_those_of_drawn_lengths() -> None:
    """Against 200,000 drawn futures of six sequences, one of which has outlived its forecast by far."""
    rng = np.random.default_rng(4)
    forecast = Forecast(np.log([40.0, 60, 100, 150, 200, 300]), np.full(6, 0.3))
    generated = np.array([100.0, 50, 80, 90, 100, 110])
    view = predict_remaining(forecast, forecast, generated, 0.2)
    mean, sd = forecast.mean_log.mean(), np.sqrt(0.09 + forecast.mean_log.var())
    draws = np.empty((6, 200_000))
    for i in range(6):
        own, pool = 0.8 * norm.sf((np.log(generated[i]) - forecast.mean_log[i]) / 0.3), 0.2 * norm.sf((np.log(generated[i]) - mean) / sd)
        surprising = rng.random(draws.shape[1]) < pool / (own + pool)
        for chosen, (centre, width) in ((~surprising, (forecast.mean_log[i], 0.3)), (surprising, (mean, sd))):
            low = norm.cdf((np.log(generated[i]) - centre) / width)
            z = norm.ppf(low + (1 - low) * rng.random(int(chosen.sum())))
            draws[i, chosen] = np.exp(centre + width * z) - generated[i]
    for k in (3, 10, 16):
        assert view.alive[:, k] == pytest.approx((draws > view.tokens[k]).mean(1), abs=0.01)
    last = np.bincount(draws.argmax(0), minlength=6) / draws.shape[1]
    assert view.critical == pytest.approx(last, abs=0.06)
    assert view.critical.sum() == pytest.approx(1)
    for i in range(6):
        late = (draws[i] + 40.0 > np.delete(draws, i, 0).max(0)).mean()
        assert view.last(40.0)[i] == pytest.approx(late, abs=0.06)
    assert view.critical[0] > view.critical[1]  # forecast 40, but at 100 already: no longer one of the short


def test_nobody_outlives_the_length_at_which_responses_are_cut() -> None:
    """Before it nothing changes; at it all end, so that who began later is the last."""
    forecast = Forecast(np.log([90.0, 120, 150]), np.full(3, 0.4))
    generated = np.array([60.0, 60, 20])
    free, cut = (predict_remaining(forecast, forecast, generated, 0.1, limit) for limit in (np.inf, 128.0))
    assert float(cut.tokens.max()) == 108  # until the one that is farthest from it gets there
    for i in range(3):
        until = cut.tokens < 128 - generated[i]
        assert cut.alive[i, until] == pytest.approx(np.interp(cut.tokens[until], np.r_[0, free.tokens], np.r_[1, free.alive[i]]), abs=0.03)
        assert not cut.alive[i, ~until].any()
    assert cut.critical[2] > 0.9 > free.critical[2]


def test_one_that_was_cut_says_that_lengths_are_beyond() -> None:
    """Half have ended at the limit: calibrated, the forecasts are no shorter for it than by those that go on."""
    forecast, actor = Forecast(np.full(40, np.log(200.0)), np.full(40, 0.3)), np.arange(40) % 2
    finished = actor == 0
    live = LiveState(forecast, np.where(finished, 128.0, 100.0), finished, actor, (0, 1))
    told, known = (remaining_lengths(replace(live, limit=limit), Settings(0.1, 2, uninformative_share=0.0)) for limit in (np.inf, 128.0))
    assert known.alive[0, known.tokens < 27].min() > told.alive[0, told.tokens < 27].min()


@pytest.mark.parametrize("count", [1, 4, 50])
def test_expected_time_is_that_of_the_static_formula_when_lengths_are_known(count: int) -> None:
    lengths = np.full(count, 120.0)
    tokens = np.linspace(0, 130, 1301)[1:]
    alive = np.concatenate([[[float(count)]], (lengths[:, None] > tokens).sum(0)[None].astype(float)], 1)
    estimate = estimate_split(alive, tokens, SPEED.base_s, SPEED.per_seq_s, 0.1)
    assert estimate.time_s == pytest.approx(SPEED.rollout_s(lengths), rel=0.05)  # the clock has 40 ticks
    assert estimate.cost == pytest.approx(SPEED.base_s * 120, rel=0.01)  # above the work, which no split changes


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_splits_judged_side_by_side_are_judged_as_each_by_itself(groups: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.cumsum(rng.uniform(1, 40, 12))
    count = rng.integers(1, 30, sum(groups)).astype(float)
    alive = np.concatenate([count[:, None], count[:, None] * np.sort(rng.random((len(count), 12)), axis=1)[:, ::-1]], 1)
    first = np.cumsum(groups) - groups
    time_s, cost = estimate_splits(alive, first, tokens, SPEED.base_s, SPEED.per_seq_s)
    for k, rows in enumerate(np.split(alive, first[1:])):
        alone = estimate_split(rows, tokens, SPEED.base_s, SPEED.per_seq_s, 0.1)
        assert (time_s[k], cost[k]) == pytest.approx((alone.time_s, alone.cost), rel=1e-9)


def test_in_the_dark_it_consolidates_and_nothing_else() -> None:
    """Forecasts that explain nothing: exactly what the law does that has none."""
    rng = np.random.default_rng(12)
    truth = np.round(rng.lognormal(5, 0.6, 200))
    drawn = rng.lognormal(5, 0.6, (200, 32))
    for prefer in (0.2, 0.6, 1.0):
        ours, plain = (
            simulate_rollout(truth, drawn, SPEED, policy=policy, max_actors=12, prefer=prefer) for policy in ("ours", "consolidate")
        )
        assert (ours.time_s, ours.cost) == pytest.approx((plain.time_s, plain.cost), rel=1e-6)


def known_outlook(remaining: np.ndarray) -> RemainingLengths:
    forecast = Forecast(np.log(remaining), np.full(len(remaining), 0.02))
    return predict_remaining(forecast, forecast, np.ones(len(remaining)), 0.0)


@given(st.integers(0, 10_000), st.floats(0.02, 2.0))
@settings(deadline=None, max_examples=15)
def test_the_split_found_is_near_the_best_of_all_contiguous_ones(seed: int, cost_weight: float) -> None:
    rng = np.random.default_rng(seed)
    view = known_outlook(np.sort(rng.lognormal(5, 0.6, 9))[::-1])
    base, per_seq = 1.0, 0.3
    found = best_split(view, base, per_seq, cost_weight, 5)
    order = np.argsort(-view.critical, kind="stable")
    best = np.inf
    for m in range(1, 6):
        for inner in itertools.combinations(range(1, 9), m - 1):
            parts = np.split(order, inner)
            alive = np.stack([np.r_[float(len(part)), view.alive[part].sum(0)] for part in parts])
            best = min(best, estimate_split(alive, view.tokens, base, per_seq, cost_weight).score)
    assert best <= found.estimate.score * (1 + 1e-9) and found.estimate.score <= 1.1 * best


def halfway(said: np.ndarray, truth: np.ndarray, tokens: float) -> float:
    """`observed_uninformative_share` for log lengths `truth` forecast as `said`, after `tokens`."""
    finished = truth <= np.log(tokens)
    return observed_uninformative_share(Forecast(said, np.full(len(said), 0.35)), np.exp(np.minimum(truth, np.log(tokens))), finished)


def test_forecasts_that_order_the_long_are_believed_and_others_are_not() -> None:
    rng = np.random.default_rng(6)
    said = rng.normal(5.0, 0.5, 600)
    truth = said + 0.35 * rng.normal(size=600)
    doubt = halfway(said, truth, 1.0)
    assert doubt == pytest.approx(SHARES @ SHARE_PRIOR)
    assert halfway(said, truth, 250.0) < 0.15 < doubt
    assert halfway(rng.permutation(said), truth, 250.0) > 0.9
    freak = truth.copy()
    low = np.argsort(said)[:200]
    freak[low] = rng.permutation(truth)[:200]  # right about two thirds, and the short third may be anything
    assert halfway(said, truth, 250.0) < halfway(said, freak, 250.0) < doubt + 0.3


def test_without_information_the_law_decides_and_loads_are_even() -> None:
    n, cost_weight = 400, 0.1
    forecast = Forecast(np.full(n, 5.0), np.full(n, 0.4))
    split = best_split(predict_remaining(forecast, forecast, np.full(n, 20.0), 0.1), SPEED.base_s, SPEED.per_seq_s, cost_weight, 64)
    law = np.sqrt(SPEED.per_seq_s * n / (cost_weight * SPEED.base_s))
    assert 0.4 * law <= split.groups <= 1.6 * law
    counts = np.bincount(split.group)
    assert counts.max() <= 2.5 * counts.min()


def test_where_the_law_asks_for_one_lease_no_second_is_opened() -> None:
    """Leases that later merges would shorten are not counted as if those merges came at once."""
    n = 512
    mean = np.log(200) + np.random.default_rng(0).normal(0, 0.48, n)
    live = LiveState(Forecast(mean, np.full(n, 0.36)), np.zeros(n), np.zeros(n, bool), np.full(n, -1))
    for law in (1, 2):
        cost_weight = SPEED.per_seq_s * n / (SPEED.base_s * law**2)
        assert len(decide_moves(live, SPEED, Settings(cost_weight, 16, 0.1, 0.3)).open) == law


def test_the_likely_long_sit_on_lightly_loaded_actors() -> None:
    live, _ = state(400)
    moves = decide_moves(live, SPEED, Settings(0.03, 12))
    index = live.live
    counts = np.bincount(moves.actor[index], minlength=12)
    mean = [live.forecast.mean_log[index][moves.actor[index] == a].mean() for a in range(12) if counts[a]]
    counts = counts[counts > 0]
    assert np.corrcoef(counts, mean)[0, 1] < -0.5


def test_a_sequence_that_outlives_its_forecast_leaves_the_crowd() -> None:
    n = 200
    mean = np.full(n, np.log(60.0))
    mean[100:] = np.log(200.0)
    generated = np.full(n, 30.0)
    load = []
    for tokens in (30.0, 180.0):  # sequence 0: forecast 60
        generated[0] = tokens
        live = LiveState(Forecast(mean, np.full(n, 0.3)), generated.copy(), np.zeros(n, bool), np.zeros(n, int), (0,))
        actor = decide_moves(live, SPEED, Settings(0.02, 16, learn=False)).actor
        load.append(int((actor == actor[0]).sum()))
    assert load[1] < load[0]


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.05, 0.5]), st.sampled_from([0.0, 0.3]), st.floats(0.003, 3.0))
@settings(deadline=None, max_examples=20)
def test_moves_say_exactly_what_changes(seed: int, migrate_s: float, start_s: float, cost_weight: float) -> None:
    live, _ = state(80, seed, actors=4)
    moves = decide_moves(live, SPEED, Settings(cost_weight, 8, migrate_s, start_s))
    index = live.live
    changed = live.actor.copy()
    for move in moves.moves:
        assert (changed[move.sequences] == move.source).all() and move.reason
        changed[move.sequences] = move.target
    assert (changed[index] == moves.actor[index]).all()
    used = set(moves.actor[index].tolist())
    assert used <= set(range(8))
    assert set(moves.open) == used - set(live.opened) and set(moves.release) == set(live.opened) - used
    if not moves.moves:
        assert moves.time_saved_s == 0 and moves.cost_saved == 0


def test_dear_moves_are_fewer_and_very_dear_ones_are_not_made() -> None:
    live, _ = state(300, 5)
    counts = []
    for migrate_s in (0.0, 0.3, 60.0):
        moves = decide_moves(live, SPEED, Settings(0.05, 12, migrate_s, migrate_s))
        counts.append(sum(len(move.sequences) for move in moves.moves))
        if migrate_s:
            saved = moves.time_saved_s + 0.05 * moves.cost_saved
            assert saved >= 0
    assert counts[0] > counts[1] >= counts[2] == 0, counts


def test_who_all_end_at_the_limit_stay_where_they_are() -> None:
    """One of two engines is ahead. Whoever moves from the other pauses, and is the last: for less than it saves where a move is quick."""
    actor = np.repeat([0, 1], 32)
    live = LiveState(
        Forecast(np.full(64, np.log(128.0)), np.full(64, 0.05)),
        np.where(actor == 0, 40.0, 52.0),
        np.zeros(64, bool),
        actor,
        (0, 1),
        limit=128.0,
    )
    quick, slow = (decide_moves(live, Speed(2e-3, 1e-4), Settings(0.05, 2, migrate_s)) for migrate_s in (0.001, 0.03))
    assert {(move.source, move.target) for move in quick.moves} == {(0, 1)} and not slow.moves


def test_the_last_few_are_merged_when_actors_are_dear_and_kept_apart_when_time_is() -> None:
    n = 4
    live = LiveState(Forecast(np.full(n, 6.0), np.full(n, 0.3)), np.full(n, 300.0), np.zeros(n, bool), np.arange(n), tuple(range(n)))
    merged = decide_moves(live, SPEED, Settings(1.0, 8, 0.05))
    assert len(np.unique(merged.actor)) == 1 and len(merged.release) == 3 and merged.cost_saved > 0
    apart = decide_moves(live, SPEED, Settings(1e-5, 8, 0.05))
    assert len(np.unique(apart.actor)) == n and not apart.moves


def test_the_same_progress_gives_the_same_moves() -> None:
    live, _ = state(150, 7)
    one, two = (decide_moves(live, SPEED, Settings(0.05, 12, 0.02)) for _ in range(2))
    assert (one.actor == two.actor).all() and one.reason == two.reason


def test_nothing_left_to_move_is_an_error() -> None:
    live, _ = state(5)
    done = LiveState(live.forecast, live.generated, np.ones(5, bool), live.actor)
    with pytest.raises(ValueError, match="every sequence has finished"):
        decide_moves(done, SPEED, Settings(0.1, 4))


def test_look_uses_what_the_rollout_showed() -> None:
    """Everything runs longer than forecast: a calibrated outlook expects more than an uncalibrated one."""
    live, truth = state(400, 8, progress=90.0)
    short = LiveState(Forecast(live.forecast.mean_log - 0.7, live.forecast.sd_log), live.generated, live.finished, live.actor)
    left = truth[live.live] - live.generated[live.live]
    k = 12
    learned, told = (remaining_lengths(short, Settings(0.1, 8, uninformative_share=0.0, learn=learn)) for learn in (True, False))
    errors = [abs(v.alive[:, k].mean() - (left > v.tokens[k]).mean()) for v in (learned, told)]
    assert errors[0] < 0.06 and errors[0] < 0.6 * errors[1]


def test_the_papers_rule_cuts_at_its_share_into_free_slots() -> None:
    finished = np.array([True] * 7 + [False] * 3 + [True] * 4 + [False] * 6)
    live = LiveState(Forecast(np.zeros(20), np.ones(20)), np.ones(20), finished, np.repeat([0, 1], 10))
    begun = np.array([10, 10])
    assert (cut_at_share(live, begun, 0.7)[7:10] == 1).all()
    assert (cut_at_share(live, begun, 0.71) == live.actor).all()
    crowded = LiveState(live.forecast, live.generated, np.array([True] * 7 + [False] * 11 + [True] * 2), live.actor)
    assert (cut_at_share(crowded, begun, 0.7) == live.actor).all()  # two free slots for three sequences


def test_names_follow_the_sequences() -> None:
    now = np.array([3, 3, 3, 1, 1, 0])
    assert relabel(np.array([0, 0, 0, 1, 1, 1]), now, (0, 1, 3), 5).tolist() == [3, 3, 3, 1, 1, 1]
    assert relabel(np.array([0, 1, 2, 2, 2, 2]), np.full(6, -1), (), 5).tolist() == [0, 1, 2, 2, 2, 2]
