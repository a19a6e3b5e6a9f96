"""What is learned, against numbers that functions of OpenRLHF's published wheels gave once (each with its version)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlhfless_ray.learn.compute_advantages import compute_advantages
from rlhfless_ray.learn.kl_estimators import bounded_kl, token_kl
from rlhfless_ray.learn.learner_rank import LearnerRank
from rlhfless_ray.learn.losses import token_weights, value_loss
from rlhfless_ray.learn.policy_model import TokenValues
from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.recipe import Recipe

LENGTHS = np.array([2, 4, 1, 3])
SEQUENCE = torch.from_numpy(np.repeat(np.arange(4), LENGTHS))
NEW = [-2.49, -0.38, -2.76, -0.35, -0.49, -2.21, -0.1, -0.22, -1.98, -2.15]
OLD = [-2.59, -0.41, -2.79, -0.3, -0.4, -2.27, -0.2, -0.17, -1.96, -2.08]
BASE = [-2.03, -0.37, -3.23, 0.09, -0.43, -2.7, -0.18, -0.6, -2.38, -2.57]
ADVANTAGES = [0.71, -0.25, -0.21, -0.5, 0.53, 0.4, 0.64, -0.56, -0.57, -0.27]
ENTROPY = [0.32, 1.81, 1.74, 0.35, 1.76, 0.5, 0.84, 1.58, 1.93, 0.64]


def recipe(**sections: Any) -> Recipe:
    return Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, **sections})


def learner(algorithm: dict[str, Any]) -> LearnerRank:
    chosen = recipe(algorithm={"importance_cap": 0, **algorithm}, run={"seed": 3})
    return LearnerRank(learner_settings(chosen))


# 0.11.2: PolicyLoss, compute_approx_kl (k3), aggregate_loss; total = policy + 0.1 · KL - 0.05 · entropy
TOTALS = [
    (
        {"loss_mean": "sequence", "regularization_mean": "token"},
        -0.14434980618057142,
        -0.19519339435619604,
        [-0.10392466, 0.0321012, 0.01727469, 0.02419885, -0.03089234, -0.02267218, -0.17605851, 0.04755209, 0.04985624, 0.02440839],
    ),
    (
        {"loss_mean": "sequence", "regularization_mean": "token", "loss": {"kind": "gspo"}},
        -0.14042087958206012,
        -0.19126446775768474,
        [-0.03652156, -0.03078132, 0.00035518, -0.00892187, -0.00401316, 0.00047894, -0.17605851, 0.04027715, 0.04041257, 0.0405453],
    ),
    (
        {},
        -0.010832703546518769,
        -0.06167629172214338,
        [-0.08430787, 0.02566086, 0.02538952, 0.0420344, -0.04905672, -0.03859973, -0.0699621, 0.05643023, 0.05916812, 0.02860416],
    ),
]


def losses(algorithm: dict[str, Any]) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
    loss = {"entropy_coefficient": 0.05, **algorithm.get("loss", {})}
    made = learner({**algorithm, "loss": loss, "kl": {"coefficient": 0.1, "estimator": "k3"}})
    logprobs, entropy = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (NEW, ENTROPY))
    made._forward = lambda module, tensors: (logprobs, entropy)  # type: ignore[method-assign, assignment]
    weights = torch.from_numpy(made._weights(torch.from_numpy(LENGTHS)))[:, SEQUENCE]
    known = {"advantages": ADVANTAGES, "drawn": OLD, "old": OLD, "reference": BASE}
    mine = {name: torch.tensor(x, dtype=torch.float64) for name, x in known.items()}
    total, sums, _ = made._micro_loss({"sequence": SEQUENCE}, weights, mine, 4, 0.1)
    total.backward()
    return total, sums, logprobs.grad, entropy.grad


@pytest.mark.parametrize(("algorithm", "policy", "total", "gradient"), TOTALS)
def test_kl_loss_and_entropy_bonus_are_means_of_tokens(
    algorithm: dict[str, Any], policy: float, total: float, gradient: list[float]
) -> None:
    found, sums, by_logprob, by_entropy = losses(algorithm)
    assert float(sums[1]) == pytest.approx(policy, abs=1e-7) and float(sums[2]) == pytest.approx(0.06506411731243134, abs=1e-7)
    assert found.item() == pytest.approx(total, abs=1e-7)
    np.testing.assert_allclose(by_logprob, gradient, atol=1e-7)
    np.testing.assert_allclose(by_entropy, -0.005, atol=1e-9)


def test_without_a_mean_of_their_own_they_follow_the_loss() -> None:
    _, _, by_logprob, by_entropy = losses({"loss_mean": "sequence"})
    np.testing.assert_allclose(by_entropy, -0.05 / (4 * LENGTHS[SEQUENCE.numpy()]), atol=1e-9)
    assert np.abs(by_logprob.numpy() - TOTALS[0][3]).max() > 0.002


# 0.11.2: CriticModel's (value - mean) / std with mean 1.5 and std 0.01, compute_reward, get_advantages_and_returns (gamma 1,
# lambda 0.95), ValueLoss (clip 0.5)
RAW_VALUES = [0.28, 1.496, 1.534, 1.464, 1.472, 1.485, 1.507, 1.476, 1.501, 1.463]
VALUES = [-122.0, -0.4, 3.4, -3.6, -2.8, -1.5, 0.7, -2.4, 0.1, -3.7]
REWARDS = [-125.0, 2.0, -1.0, 50.0]
RETURNS = [-118.77, -125.0, 1.33406086, 1.59374828, 1.82499819, 1.99999809, -0.99999905, 44.95425, 47.315, 50.0]
NOT_WHITENED = [3.23, -124.6, -2.06593914, 5.19374828, 4.62499819, 3.49999809, -1.69999905, 47.35425, 47.215, 53.7]
MOVED = np.array([[0.002, -0.004, 0.006, -0.001][k] for n in LENGTHS for k in range(n)])
BY_VALUE = [-0.303, 12.42, 0.22659391, -0.55937483, 0.0, -0.35999981, 0.18999991, -4.715425, -4.7615, 0.0]


class Head(torch.nn.Module):
    """A model whose head gives chosen values."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def base_model(self, **_: Any) -> Any:
        return type("Out", (), {"last_hidden_state": self.values[None]})

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, None]


def test_values_are_normalized_in_passes_advantages_and_loss() -> None:
    places = torch.arange(10)
    tensors = {"ids": places[None], "rows": torch.zeros_like(places), "columns": places}
    critic = TokenValues(Head(RAW_VALUES), 1.5, 0.01)
    with torch.no_grad():
        values = critic(**tensors)
    np.testing.assert_allclose(values, VALUES, rtol=1e-5, atol=1e-4)
    chosen = recipe(algorithm={"advantage": {"estimator": "gae", "gamma": 1.0, "lambd": 0.95}})
    advantages, returns, _ = compute_advantages(
        chosen.algorithm, chosen.reward, np.array([REWARDS]).T, LENGTHS, np.zeros(4, bool), 9, values=np.array(VALUES)
    )
    np.testing.assert_allclose(returns, RETURNS, atol=1e-5)
    flat = np.array(NOT_WHITENED)
    np.testing.assert_allclose(advantages, (flat - flat.mean()) / flat.std(), atol=1e-6)
    moved = TokenValues(Head(list(np.array(RAW_VALUES) + MOVED)), 1.5, 0.01)
    head: Any = moved.model
    now = moved(**tensors)
    now.retain_grad()
    weight = float(token_weights(torch.from_numpy(LENGTHS), "token")[0])
    loss = value_loss(now, torch.tensor(VALUES), torch.tensor(RETURNS), 0.5)[0].sum() * weight
    loss.backward()
    assert float(loss) == pytest.approx(1141.289125359432, rel=1e-5)
    np.testing.assert_allclose(now.grad, BY_VALUE, atol=2e-4)
    np.testing.assert_allclose(head.values.grad, np.array(now.grad) / 0.01, rtol=1e-5)


KLS = {  # of log-probabilities of policy and reference, 0.8.5 and 0.8.6
    "k1": ([0.5, -14.0, 12.0, -5.0], [0.5, -10.0, 10.0, -5.0]),
    "k2": ([0.125, 98.0, 72.0, 12.5], [0.125, 10.0, 10.0, 10.0]),
    "k3": ([0.10653066635131836, 1202589.25, 11.000005722045898, 142.4131622314453], [0.10653066635131836, 10.0, 10.0, 10.0]),
}


@pytest.mark.parametrize("name", KLS)
@pytest.mark.parametrize("limit", [None, 10.0])
def test_estimates_of_the_kl_are_cut_from_0_8_6_on(name: str, limit: float | None) -> None:
    policy, reference = np.float32([-1.0, -15.0, -0.5, -6.0]), np.float32([-1.5, -1.0, -12.5, -1.0])
    wanted = KLS[name][limit is not None]
    np.testing.assert_allclose(token_kl(policy, reference, name, limit), wanted, rtol=1e-6)
    np.testing.assert_allclose(bounded_kl(torch.from_numpy(policy), torch.from_numpy(reference), name, limit), wanted, rtol=1e-6)


RLOO = {  # 0.8.4 with and without --no_advantage_std_norm, and 0.8.5 with either; groups of two, rewards 1, 0 and 3, 0.5
    (True, True): [1.05227363, 1.05227363, *[-0.18569535] * 4, 1.98075032, *[-1.11417198] * 3],
    (True, False): [1.7, 1.7, *[-0.3] * 4, 3.2, *[-1.8] * 3],
    (None, True): [1.0, 1.0, *[-1.0] * 4, 2.5, *[-2.5] * 3],
}


@pytest.mark.parametrize(("whiten", "divide"), RLOO)
def test_rloo_was_whitened_up_to_0_8_4(whiten: bool | None, divide: bool) -> None:
    chosen = recipe(algorithm={"advantage": {"estimator": "rloo", "whiten": whiten, "normalize_std": divide}})
    sections = chosen.algorithm, chosen.reward
    found, *_ = compute_advantages(*sections, np.array([[1.0, 0.0], [3.0, 0.5]]), LENGTHS, np.zeros(4, bool), 9)
    np.testing.assert_allclose(found, RLOO[whiten, divide], atol=1e-6)


# 0.11.2: apply_length_penalties, buffer 16, factor 2, data.max_len 64
@pytest.mark.parametrize(("limit", "wanted"), [(64, [0.0, 0.0, -1.0, -1.5, -1.875, -2.0]), (None, [0.0, 0.0, -1.5, -2.0, -2.0, -2.0])])
def test_the_overlong_penalty_is_full_at_its_limit(limit: int | None, wanted: list[float]) -> None:
    reward = {"function": "task", "overlong_buffer_tokens": 16, "overlong_penalty": 2.0, "overlong_limit_tokens": limit}
    chosen = recipe(algorithm={"advantage": {"estimator": "reinforce"}}, reward=reward, rollout={"max_tokens": 60})
    lengths = np.array([1, 40, 56, 60, 63, 99])
    sections = chosen.algorithm, chosen.reward
    *_, earned = compute_advantages(*sections, np.zeros((6, 1)), lengths, np.zeros(6, bool), 60)
    np.testing.assert_allclose(earned, wanted)


@pytest.mark.parametrize(("feedback", "counted"), [(True, [5, 4]), (False, [3, 2])])
def test_feedback_between_actions_makes_an_episode_longer(feedback: bool, counted: list[int]) -> None:
    """From the first to the last action, as samples_generator.py of 0.11.2 has it; what comes before and after is none of it."""
    mask = np.array([1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0], bool)
    reward = {"function": "task", "overlong_buffer_tokens": 6, "overlong_limit_tokens": 6, "overlong_feedback": feedback}
    chosen = recipe(algorithm={"advantage": {"estimator": "reinforce"}}, reward=reward)
    sections = chosen.algorithm, chosen.reward
    *_, earned = compute_advantages(*sections, np.zeros((2, 1)), np.array([6, 6]), np.zeros(2, bool), 60, mask=mask)
    np.testing.assert_allclose(earned, -np.array(counted) / 6)
