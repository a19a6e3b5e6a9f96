"""What siblings say of each other: shares of variance and posteriors against closed forms and simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from placement import Speed
from placement.forecast.group_conditioning import condition_on_siblings, group_error_correlation
from placement.forecast.remaining_length import Forecast
from placement.migration.decide_moves import LiveState, Settings, decide_moves, remaining_lengths


def drawn(share: float, prompts: int = 40, samples: int = 8, draws: int = 64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Joint draws (n, S) whose log error has this share in common within a prompt, and the prompt of each row."""
    rng, group = np.random.default_rng(seed), np.repeat(np.arange(prompts), samples)
    common = rng.normal(0, np.sqrt(share), (prompts, draws))[group]
    return np.exp(5 + 0.5 * (common + rng.normal(0, np.sqrt(1 - share), (len(group), draws)))), group


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_the_share_in_common_is_found_in_the_draws(share: float) -> None:
    draws, group = drawn(share)
    assert group_error_correlation(draws, group) == pytest.approx(share, abs=0.04)
    assert group_error_correlation(draws, np.arange(len(group))) == 0 and group_error_correlation(draws[:, :2], group) == 0
    everybody = draws * np.exp(np.random.default_rng(1).normal(0, 1, draws.shape[1]))
    assert group_error_correlation(everybody, group) == pytest.approx(share, abs=0.04), "what all have in common says nothing of groups"


def test_ended_siblings_are_the_posterior_of_a_normal_mean() -> None:
    """Against the conditional of a multivariate normal: three siblings ended, one has not begun."""
    share, sd = 0.6, 0.4
    forecast = Forecast(np.array([5.0, 5.5, 4.8, 5.2]), np.full(4, sd))
    lengths = np.array([300.0, 260.0, 150.0, 0.0])
    found = condition_on_siblings(forecast, lengths, np.array([True, True, True, False]), np.zeros(4, int), share)
    cov = sd**2 * (share * np.ones((4, 4)) + (1 - share) * np.eye(4))
    gain = np.linalg.solve(cov[:3, :3], cov[:3, 3])
    assert found.mean_log[3] == pytest.approx(5.2 + gain @ (np.log(lengths[:3]) - forecast.mean_log[:3]), abs=1e-6)
    assert found.sd_log[3] ** 2 == pytest.approx(cov[3, 3] - gain @ cov[:3, 3], abs=1e-6)


def test_running_siblings_are_lower_bounds() -> None:
    """Seven siblings that outlived their forecast and have not ended: the eighth is longer too, about as importance sampling says."""
    share, sd = 0.6, 0.5
    forecast = Forecast(np.full(8, 5.0), np.full(8, sd))
    so_far = np.full(8, np.exp(5.2))
    so_far[7] = 1.0
    found = condition_on_siblings(forecast, so_far, np.zeros(8, bool), np.zeros(8, int), share)
    rng = np.random.default_rng(0)
    common = rng.normal(0, np.sqrt(share) * sd, 200_000)
    each = multivariate_normal(np.zeros(7), (1 - share) * sd**2 * np.eye(7)).rvs(200_000, random_state=1) + common[:, None]
    kept = common[(each > 0.2).all(1)]
    assert found.mean_log[7] == pytest.approx(5 + kept.mean(), abs=0.08)
    assert found.sd_log[7] == pytest.approx(np.sqrt((1 - share) * sd**2 + kept.var()), rel=0.08)


def test_on_draws_the_long_ones_are_found_by_their_siblings() -> None:
    draws, group = drawn(0.7, draws=65)
    truth, known = draws[:, 0], draws[:, 1:]
    at = np.quantile(truth, 0.7)
    live = truth > at
    forecast = Forecast.from_scenarios(known)
    found = condition_on_siblings(forecast, np.minimum(truth, at), ~live, group, group_error_correlation(known, group))
    left = np.log(truth[live])
    assert np.corrcoef(found.mean_log[live], left)[0, 1] > np.corrcoef(forecast.mean_log[live], left)[0, 1] + 0.2
    assert np.all(found.sd_log <= forecast.sd_log * (1 + 1e-9))


def test_nothing_in_common_or_no_group_changes_no_decision() -> None:
    draws, group = drawn(0.5, prompts=6, samples=4)
    truth = draws[:, 0]
    done = truth < np.median(truth)
    state = LiveState(Forecast.from_scenarios(draws), np.minimum(truth, np.median(truth)), done, np.arange(24) % 3, (0, 1, 2), 100.0)
    alone = replace(state, group=np.arange(24), group_correlation=group_error_correlation(draws, np.arange(24)))
    settings, speed = Settings(0.3, 4), Speed(0.01, 1e-4)
    assert np.array_equal(decide_moves(state, speed, settings).actor, decide_moves(alone, speed, settings).actor)
    with_siblings = remaining_lengths(replace(state, group=group, group_correlation=0.5), settings)
    assert not np.allclose(remaining_lengths(state, settings).critical, with_siblings.critical)
