from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.forecast.forecaster import LengthForecaster, forecast_quality
from placement.forecast.history import LengthHistory
from placement.forecast.regression import FeatureLine


def visit(forecaster: LengthForecaster, prompt: int, size: int, lengths: list[float]) -> None:
    forecaster.observe([prompt], [size], [np.array(lengths)])


class World:
    """Prompts with known variance shares of log length: the published ones by default (prompt 64.8 %, sampling 26.1 %, drift
    2.2 % over the whole run; TailSieve), of a total of 0.8."""

    def __init__(self, seed: int, prompts: int = 600, total: float = 0.8, drift: float = 0.022 / 20, heavy: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.prompt_variance, self.sampling_variance, self.drift_variance = 0.648 * total, 0.261 * total, drift * total
        self.effect = self.rng.normal(0, np.sqrt(self.prompt_variance), prompts)
        self.tokens = np.exp(self.rng.normal(4, 0.4, prompts)).round() + 1
        self.level, self.heavy = 0.0, heavy

    def step(self, prompts: np.ndarray, samples: int, cap: float = np.inf) -> np.ndarray:
        """(prompts, samples) tokens, and the policy drifts on."""
        self.level += self.rng.normal(0, np.sqrt(self.drift_variance))
        shape = (len(prompts), samples)
        own = self.rng.standard_t(5, shape) * np.sqrt(0.6) if self.heavy else self.rng.normal(size=shape)
        center = 5.5 + self.level + self.effect[prompts] + 0.3 * np.log(self.tokens[prompts] / 50)
        return np.minimum(np.ceil(np.exp(center[:, None] + np.sqrt(self.sampling_variance) * own)), cap)


def trained(
    world: World, steps: int, *, batch: int = 48, samples: int = 8, cap: float | None = None, skip: int = 4, fresh: bool = False
) -> tuple[LengthForecaster, np.ndarray, np.ndarray]:
    """A forecaster after so many steps, and the scenarios and lengths of the steps after the first few."""
    forecaster = LengthForecaster(300, max_tokens=cap)
    order = world.rng.permutation(len(world.effect))
    drawn, came = [], []
    for step in range(steps):
        prompts = order[step * batch : (step + 1) * batch] if fresh else world.rng.choice(len(order), batch, replace=False)
        lengths = world.step(prompts, samples, np.inf if cap is None else cap)
        if step >= skip:
            drawn.append(forecaster.scenarios(prompts, world.tokens[prompts], samples, 64, step))
            came.append(lengths.ravel())
        forecaster.observe(prompts, world.tokens[prompts], list(lengths))
    return forecaster, np.concatenate(drawn), np.concatenate(came)


# ---- what it says ------------------------------------------------------------------------------------------------


def test_nothing_seen_is_the_default() -> None:
    forecaster = LengthForecaster(128.0)
    np.testing.assert_allclose(forecaster.forecast([3, 9], [5, 500]), 128.0, rtol=0.05)
    assert len(forecaster.forecast([], [])) == 0
    assert forecaster.scenarios([], [], 8, 16, 0).shape == (0, 16)
    forecaster.observe([], [], [])
    forecaster.observe([4], [10], [np.empty(0)])
    np.testing.assert_allclose(forecaster.forecast([4], [5]), 128.0, rtol=0.05)


def test_a_prompt_seen_often_is_forecast_by_its_own_responses() -> None:
    world = World(0, drift=0.0)
    forecaster, _, _ = trained(world, 40)
    prompts = np.arange(600)
    seen = ~np.isnan(forecaster.history.get(prompts)[:, 0])
    center = forecaster.predict(prompts, world.tokens).center
    truth = 5.5 + world.effect + 0.3 * np.log(world.tokens / 50)
    error = (center - truth)[seen]
    assert np.sqrt(np.mean(error**2)) < 1.2 * np.sqrt(world.sampling_variance / 8), "about what one group's own mean is off by"
    assert np.std(truth[seen]) > 4 * np.sqrt(np.mean(error**2))


def test_a_new_prompt_is_forecast_by_others_of_its_size() -> None:
    rng = np.random.default_rng(1)
    forecaster = LengthForecaster(100.0)
    for step in range(8):
        sizes = rng.integers(5, 60, 40)
        lengths = np.exp(4 + 0.02 * sizes[:, None] + rng.normal(0, 0.2, (40, 4)))
        forecaster.observe(list(range(40 * step, 40 * step + 40)), sizes, list(lengths))
    found = forecaster.predict([10_000, 10_001, 10_002], [10, 50, 1000]).center
    np.testing.assert_allclose(found[:2], [4.2, 5.0], atol=0.12)
    assert found[2] == pytest.approx(5.18, abs=0.12), "never beyond the sizes that were seen"


def test_a_drifting_policy_is_followed_also_for_prompts_seen_long_ago() -> None:
    world = World(2, drift=0.0)
    forecaster, _, _ = trained(world, 12, batch=50, fresh=True)  # every prompt once
    for step in range(12):  # the policy doubles its lengths; only the second half of the prompts is seen
        world.level = np.log(2) * min(1, step / 6)
        prompts = world.rng.choice(np.arange(300, 600), 48, replace=False)
        forecaster.observe(prompts, world.tokens[prompts], list(world.step(prompts, 8)))
    old = np.arange(300)
    truth = 5.5 + world.level + world.effect[old] + 0.3 * np.log(world.tokens[old] / 50)
    assert np.mean(forecaster.predict(old, world.tokens[old]).center - truth) == pytest.approx(0, abs=0.08)


@given(st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=5), min_size=1, max_size=6), st.floats(0.1, 1.0))
@settings(max_examples=40, deadline=None)
def test_history_is_an_exponential_mean_and_the_spread_a_weighted_variance(groups: list[list[int]], weight: float) -> None:
    history = LengthHistory(weight, 10)
    mean = inverse = variance = freedom = None
    for group in groups:
        y = np.log(group)
        history.visit([7], np.array([y.mean()]), np.array([len(y)]), np.array([((y - y.mean()) ** 2).sum()]))
        new = (y.mean(), 1 / len(y), y.var(ddof=1) if len(y) > 1 else 0.0, len(y) - 1)
        if mean is None:
            mean, inverse, variance, freedom = new
        else:
            mean = (1 - weight) * mean + weight * new[0]
            inverse = (1 - weight) ** 2 * inverse + weight**2 * new[1]
            kept = (1 - weight) * freedom
            variance = (kept * variance + new[3] * new[2]) / (kept + new[3]) if kept + new[3] > 0 else 0.0
            freedom = kept + new[3]
    np.testing.assert_allclose(history.get([7])[0], [mean, 1 / inverse, variance, freedom], rtol=1e-4, atol=1e-5)


def test_the_history_is_bounded_and_forgets_the_longest_unvisited() -> None:
    history = LengthHistory(0.5, 3)
    for prompt in (1, 2, 3, 1, 4):
        history.visit([prompt], np.ones(1), np.ones(1), np.zeros(1))
    assert sorted(history.rows) == [1, 3, 4]


@given(st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_the_line_against_least_squares(seed: int, features: int) -> None:
    rng = np.random.default_rng(seed)
    line, rows, ys, weights = FeatureLine(0.8), [], [], []
    slope = rng.normal(size=features)
    for step in range(5):
        x = rng.normal(3, 2, (300, features))
        y = 1 + x @ slope + rng.normal(0, 0.3, 300)
        line.add(x, y)
        rows.append(np.column_stack([np.ones(300), x]))
        ys.append(y)
        weights.append(np.full(300, np.sqrt(0.8 ** (4 - step))))
    w = np.concatenate(weights)
    beta = np.linalg.lstsq(np.concatenate(rows) * w[:, None], np.concatenate(ys) * w, rcond=None)[0]
    asked = rng.normal(3, 1, (20, features))
    np.testing.assert_allclose(line.predict(asked), beta[0] + asked @ beta[1:], atol=0.03)
    assert line.variance() == pytest.approx(0.09, rel=0.15)


def test_features_that_do_not_vary_say_nothing() -> None:
    line = FeatureLine(1.0)
    line.add(np.full((6, 2), 8.0), np.array([1.0, 2, 3, 4, 5, 6]))
    np.testing.assert_allclose(line.predict(np.array([[8.0, 8.0], [500.0, 1.0]])), 3.5)


# ---- how sure it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heavy", "seed"), [(False, 3), (True, 4)])
def test_calibrated_for_known_variance_shares(heavy: bool, seed: int) -> None:
    world = World(seed, heavy=heavy)
    forecaster, drawn, came = trained(world, 40)
    quality = forecast_quality(drawn, came)
    assert quality.coverage_50 == pytest.approx(0.5, abs=0.03)
    assert quality.coverage_90 == pytest.approx(0.9, abs=0.02)
    assert quality.pit_error < 0.03
    shares = forecaster.shares()
    assert shares.prompt == pytest.approx(world.prompt_variance, rel=0.25)
    assert shares.sampling == pytest.approx(world.sampling_variance, rel=0.1)
    assert shares.drift < 4 * world.drift_variance and shares.wander < 0.05 * world.prompt_variance


def test_calibrated_for_prompts_never_seen() -> None:
    _, drawn, came = trained(World(5, prompts=1200), 25, fresh=True)
    quality = forecast_quality(drawn, came)
    assert quality.coverage_50 == pytest.approx(0.5, abs=0.05)
    assert quality.coverage_90 == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("cap", [400, 800])
def test_lengths_cut_at_the_limit_are_lower_bounds(cap: int) -> None:
    """A quarter and a tenth of the responses are cut; what is estimated is the policy's variance, not that of cut
    lengths."""
    world = World(6)
    forecaster, drawn, came = trained(world, 40, cap=cap)
    quality = forecast_quality(drawn, came)
    assert drawn.max() <= cap
    assert (drawn == cap).mean() == pytest.approx((came == cap).mean(), abs=0.015)
    assert quality.coverage_50 == pytest.approx(0.5, abs=0.03)
    assert quality.coverage_90 == pytest.approx(0.9, abs=0.02)
    naive = np.log(came).reshape(-1, 8).var(1, ddof=1).mean()
    found = forecaster.shares().sampling
    assert abs(found - world.sampling_variance) < 0.5 * abs(naive - world.sampling_variance)


def test_a_prompt_that_is_always_cut_does_not_run_away() -> None:
    forecaster = LengthForecaster(100, max_tokens=256)
    for _ in range(200):
        visit(forecaster, 3, 20, [256.0] * 4)
    predicted = forecaster.predict([3], [20], 4)
    assert (predicted.quantiles(np.array([0.1])) == 256).all()
    assert predicted.center[0] < np.log(256) + 4


def test_siblings_and_batches_vary_together_as_they_should() -> None:
    forecaster, _, _ = trained(World(7), 20)
    predicted = forecaster.predict(np.arange(1000, 1040), np.full(40, 50.0), 8)  # never seen: the prompt's effect is unknown
    log = np.log(predicted.draw(4000, 0).lengths.astype(float))
    log = (log - log.mean(1, keepdims=True)).reshape(40, 8, -1)
    within_group = np.mean(log[:, 0] * log[:, 1])
    across = np.mean(log[0, 0] * log[20:, 0].mean(0))
    assert within_group == pytest.approx(np.mean(predicted.prompt_sd**2) + predicted.drift_sd**2, rel=0.1)
    assert across == pytest.approx(predicted.drift_sd**2, abs=0.02)
    assert np.mean(log**2) == pytest.approx(within_group + np.mean(predicted.spread**2), rel=0.1)


# ---- state -------------------------------------------------------------------------------------------------------

VISIT = st.tuples(st.integers(0, 9), st.integers(1, 50), st.lists(st.integers(1, 300), min_size=1, max_size=4))


@given(st.lists(VISIT, max_size=12))
@settings(max_examples=30, deadline=None)
def test_state_survives_json(visits: list[tuple[int, int, list[int]]]) -> None:
    forecaster = LengthForecaster(64.0, max_tokens=280)
    for prompt, size, lengths in visits:
        visit(forecaster, prompt, size, lengths)
    copy = LengthForecaster(64.0, max_tokens=280)
    visit(copy, 2, 3, [5.0])  # what it held before does not matter
    copy.restore(json.loads(json.dumps(forecaster.state())))
    asked = (list(range(12)), list(range(1, 61, 5)))
    np.testing.assert_array_equal(copy.scenarios(*asked, 3, 16, 1), forecaster.scenarios(*asked, 3, 16, 1))
    for both in (copy, forecaster):
        visit(both, 3, 7, [11.0, 280.0])
    np.testing.assert_array_equal(copy.scenarios(*asked, 3, 16, 1), forecaster.scenarios(*asked, 3, 16, 1))
    assert copy.shares() == forecaster.shares()


def test_the_state_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.forecast.forecaster.MOST_PROMPTS", 1000)
    forecaster = LengthForecaster(64.0)
    rng = np.random.default_rng(0)
    for step in range(20):
        prompts = np.arange(step * 500, step * 500 + 500)
        forecaster.observe(prompts, np.full(500, 9), list(rng.integers(1, 99, (500, 4))))
    assert len(forecaster.history) == 1000
    assert len(json.dumps(forecaster.state())) < 1000 * 36 + 20_000


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda f: f.forecast([1, 2], [3]), "2 prompts"),
        (lambda f: f.observe([1], [3], []), "0 groups"),
        (lambda f: f.observe([1], [3], [np.array([np.nan])]), "finite"),
        (lambda f: f.observe([1], [3], [np.array([-1.0])]), "not negative"),
        (lambda f: f.scenarios([1], [3], 1, 0, 0), "at least one scenario"),
        (lambda f: f.restore({"sums": []}), "older version"),
        (lambda f: LengthForecaster(0), "default_tokens"),
    ],
)
def test_mistakes_are_named(wrong, said) -> None:
    forecaster = LengthForecaster(64.0)
    visit(forecaster, 1, 2, [3.0])
    with pytest.raises(ValueError, match=said):
        wrong(forecaster)


def test_one_step_is_enough_to_know_how_far_siblings_differ() -> None:
    """The first guess of the sampling variance is far off; what the first step shows must correct it once, not twice."""
    rng = np.random.default_rng(5)
    prompt, within = rng.normal(5.7, 0.4, 200), 0.2
    lengths = np.exp(prompt[:, None] + rng.normal(0, within, (200, 8)))
    forecaster = LengthForecaster(400.0)
    forecaster.observe(range(200), [50] * 200, list(lengths))
    for rows in (range(200, 300), range(100)):  # prompts never seen, and seen once
        logs = np.log(forecaster.scenarios(rows, [50] * 100, 8, 32, seed=1)).reshape(100, 8, 32)
        assert np.sqrt(logs.var(1, ddof=1).mean()) == pytest.approx(within, rel=0.1)


def test_a_run_with_one_response_to_each_prompt_may_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What siblings would tell does not fade to 0 / 0 where there are none; a strong fade makes 15,000 steps of twenty."""
    monkeypatch.setattr("placement.forecast.forecaster.FADE", 1e-20)
    forecaster = LengthForecaster(100.0)
    for step in range(20):
        rows = np.arange(8) + 8 * step
        forecaster.observe(rows.tolist(), [8] * 8, [np.array([40.0 + 5 * (row % 8)]) for row in rows])
    found = forecaster.predict([1000, 1001], [8, 8]).draw(16, 0).lengths
    assert np.isfinite(found).all() and 40 < found.mean() < 75
