"""Random advantages against plain Python: estimators, normalisation, discount, shaping of rewards, the KL's place and its controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.learn.compute_advantages import compute_advantages
from rlhfless_ray.learn.group_filter import kept_groups
from rlhfless_ray.learn.kl_controller import AdaptiveKL, FixedKL
from rlhfless_ray.learn.kl_estimators import token_kl
from rlhfless_ray.recipe import AlgorithmConfig, RewardConfig
from tests.fuzz import advantage_reference as wanted
from tests.fuzz.sections import READ, Read, options_in, options_of

SHAPING = {"clip_range", "stop_properly_penalty"}
SHAPING |= {f"overlong_{part}" for part in ("buffer_tokens", "limit_tokens", "feedback", "penalty")}
OF_THE_LOSS = {"unbiased_gradient"}  # see test_fuzz_learning.py
FEW, MANY = 60, 3000
MAX_TOKENS = 9


@dataclass(frozen=True)
class Case:
    algorithm: AlgorithmConfig
    reward: RewardConfig
    rewards: np.ndarray  # (prompts, samples)
    masks: list[list[bool]]
    truncated: list[bool]
    old: wanted.Rows
    reference: wanted.Rows
    values: wanted.Rows | None
    has_masks: bool


def draw_sections(rng: np.random.Generator) -> tuple[AlgorithmConfig, RewardConfig]:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    name = one_of(*wanted.WHITENS)
    advantage: dict[str, Any] = {"estimator": name, "whiten": one_of(None, True, False) if name != "online_dpo" else one_of(None, False)}
    whitens = wanted.WHITENS[name] if advantage["whiten"] is None else advantage["whiten"]
    advantage["normalize_std"] = one_of(True, False) if whitens else True
    advantage["gamma"] = one_of(1.0, 0.9, 0.0) if name in ("gae", "reinforce") else 1.0
    advantage["lambd"] = one_of(1.0, 0.8, 0.0) if name == "gae" else 1.0
    kl: dict[str, Any] = {"coefficient": one_of(0.0, 0.3), "estimator": one_of("k1", "k2", "k3"), "place": one_of("loss", "reward")}
    kl["limit"] = one_of(10.0, 0.1, None)
    more: dict[str, Any] = {}
    if name in ("on_policy_distill", "online_dpo"):
        kl |= {"coefficient": one_of(1.0, 0.4), "estimator": "k1", "place": "reward"}
    if name == "online_dpo":
        kl["limit"], more = None, {"importance_cap": 0}
    kl |= {"target": one_of(None, 0.2) if kl["coefficient"] else None, "horizon": one_of(10_000, 400)}
    reward: dict[str, Any] = {"clip_range": one_of(None, (-0.5, 0.7))}
    reward |= {"overlong_buffer_tokens": one_of(None, 3, 20), "overlong_limit_tokens": one_of(None, 6)}
    reward |= {"overlong_feedback": one_of(True, False), "overlong_penalty": one_of(1.0, 0.4)}
    reward["stop_properly_penalty"] = one_of(None, 0.5, 0.0, -1.5)
    return AlgorithmConfig.model_validate({"advantage": advantage, "kl": kl, **more}), RewardConfig.model_validate(reward)


def draw_case(seed: int) -> Case:
    rng = np.random.default_rng([seed, 2])
    algorithm, reward = draw_sections(rng)
    prompts, samples = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    kind = rng.integers(4)
    rewards = rng.normal(size=(prompts, samples)) if kind else rng.integers(0, 2, (prompts, samples)).astype(float)
    if kind == 1:  # small differences of large rewards
        rewards = 1000 + 0.01 * rewards
    if rng.random() < 0.3:  # a group of equal rewards, or of rewards that are equal up to rounding
        rewards[0] = rng.choice([0.1, 1e8]) * (1 + rng.integers(0, 2, samples) * rng.choice([0.0, 3e-16]))
    rewards[rng.random(rewards.shape) < 0.15] = np.nan
    lengths = rng.integers(0 if rng.random() < 0.3 else 1, MAX_TOKENS + 1, prompts * samples)
    has_masks = bool(rng.random() < 0.5)
    share = rng.choice([0.2, 0.7])  # with few own tokens, some responses have none
    masks = [(rng.random(n) < share if has_masks else np.ones(n, bool)).tolist() for n in lengths]

    def rows(scale: float) -> wanted.Rows:
        return [(scale * rng.normal(size=n)).astype(np.float32).astype(float).tolist() for n in lengths]

    values = rows(1.0) if algorithm.advantage.estimator == "gae" else None
    old, drift = rows(1.0), rows(rng.choice([1e-3, 0.5]))
    reference = [[float(np.float32(p - d)) for p, d in zip(*pair, strict=True)] for pair in zip(old, drift, strict=True)]
    truncated = (rng.random(len(lengths)) < 0.3).tolist()
    return Case(algorithm, reward, rewards, masks, truncated, old, reference, values, has_masks)


def flat(rows: wanted.Rows, dtype: type = np.float32) -> np.ndarray:
    return np.array([x for row in rows for x in row], dtype)


def check(case: Case) -> None:
    algorithm, reward = Read(case.algorithm, "algorithm"), Read(case.reward, "reward")
    section, in_reward = case.algorithm.kl, case.algorithm.kl.place == "reward" and case.algorithm.kl.coefficient > 0
    kl = token_kl(flat(case.old), flat(case.reference), section.estimator, section.limit) if in_reward else None
    found = compute_advantages(
        case.algorithm, case.reward, case.rewards, np.array([len(m) for m in case.masks]), np.array(case.truncated, bool), MAX_TOKENS,
        kl=kl, kl_coefficient=section.coefficient, values=None if case.values is None else flat(case.values),
        mask=flat(case.masks, bool) if case.has_masks else None,  # type: ignore[arg-type]
    )  # fmt: skip
    rows = wanted.kl_rows(algorithm.kl, case.old, case.reference) if algorithm.kl.place == "reward" and algorithm.kl.coefficient else None
    expected = wanted.advantages_of(
        algorithm, reward, case.rewards.tolist(), case.masks, case.truncated, MAX_TOKENS, kl=rows, coefficient=section.coefficient,
        values=case.values,
    )  # fmt: skip
    for name, got, right in zip(("advantages", "returns", "sums"), found, (*map(flat64, expected[:2]), np.array(expected[2])), strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5, err_msg=name)
    measured = float(np.random.default_rng(len(case.masks)).gamma(1.0)) * 0.3
    start = section.coefficient
    controller = FixedKL(start) if section.target is None else AdaptiveKL(start, section.target, section.horizon)
    after = wanted.next_coefficient(algorithm.kl, start, measured, len(case.masks))
    assert controller.after(measured, len(case.masks)).coefficient == pytest.approx(after, rel=1e-12)


def flat64(rows: wanted.Rows) -> np.ndarray:
    return flat(rows, np.float64)


def test_every_option_of_advantages_is_drawn_and_known() -> None:
    every = options_of(AlgorithmConfig, "algorithm")
    every = {option for option in every if option[0].split(".")[1] in ("advantage", "kl") and option[0].split(".")[2] not in OF_THE_LOSS}
    every |= {option for option in options_of(RewardConfig, "reward") if option[0].split(".")[1] in SHAPING}
    drawn = set[tuple[str, object]]()
    READ.clear()
    for seed in range(FEW):
        case = draw_case(seed)
        drawn |= options_in(case.algorithm, "algorithm") | options_in(case.reward, "reward")
        check(case)
    assert not every - drawn, f"never drawn: {sorted(map(str, every - drawn))}; let `draw_sections` draw them"
    assert not {key for key, _ in every} - READ, "the reference does not know these keys"


@pytest.mark.long
@pytest.mark.parametrize("first", range(FEW, FEW + MANY, 500))
def test_many_random_advantages_equal_plain_python(first: int) -> None:
    for seed in range(first, first + 500):
        check(draw_case(seed))


def test_groups_are_kept_by_the_exact_mean_of_decimal_scores() -> None:
    """A rounded mean must not put a group on the other side of a bound that it has reached."""
    rng = np.random.default_rng(3)
    for _ in range(3000):
        scores = [None if rng.random() < 0.1 else f"{rng.integers(0, 11) / 10}" for _ in range(rng.integers(1, 6))]
        low, high = sorted(rng.choice(11, 2, replace=False) / 10)
        numbers = np.array([[np.nan if score is None else float(score) for score in scores]])
        kept = bool(kept_groups(numbers, low, high)[0])
        assert kept == wanted.is_kept(scores, f"{low}", f"{high}"), (scores, low, high)
