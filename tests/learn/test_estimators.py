"""The whole way from rewards to whitened advantages, against the same steps written as loops over one sample at a time."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from benchmarks.common.estimate import estimate
from rlhfless_ray.common.estimators import ESTIMATORS
from rlhfless_ray.learn.whiten import whiten

PROMPTS, SAMPLES = 5, 4


class Case:
    """Ragged responses, some tokens of an environment, one response without action tokens."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rewards = np.round(rng.normal(1, 4, (PROMPTS, SAMPLES)), 2)
        self.lengths = rng.integers(1, 12, PROMPTS * SAMPLES)
        total = int(self.lengths.sum())
        self.kl, self.values, self.mask = rng.normal(0, 0.3, total), rng.normal(size=total), rng.random(total) < 0.8
        first = int(self.lengths[0])
        self.mask[:first] = False
        self.arguments = {"kl": self.kl, "kl_coefficient": 0.2, "clip_range": (-2.0, 3.0), "mask": self.mask}


def pairs_by_hand(case: Case) -> list[list[float]]:
    rewards, ends = [min(max(r, -2.0), 3.0) for r in case.rewards.reshape(-1).tolist()], np.cumsum(case.lengths)
    spans = [slice(end - length, end) for end, length in zip(ends, case.lengths, strict=True)]
    gaps = [sum(k for k, m in zip(case.kl[span], case.mask[span], strict=True) if m) for span in spans]
    weights = [0.0] * len(rewards)
    pairs = []
    for first in range(0, len(rewards), SAMPLES):
        group = range(first, first + SAMPLES)
        worst, best = min(group, key=lambda i: (rewards[i], i)), max(group, key=lambda i: (rewards[i], -i))
        if rewards[best] > rewards[worst]:
            pairs.append((best, worst))
    for best, worst in pairs:
        weights[best] = 0.2 / (1 + math.exp(0.2 * (gaps[best] - gaps[worst]))) * int(case.mask.sum()) / len(pairs)
        weights[worst] = -weights[best]
    return [[w if m else 0.0 for m in case.mask[span]] for w, span in zip(weights, spans, strict=True)]


def by_hand(name: str, case: Case, gamma: float, lambd: float, divide: bool) -> list[list[float]]:
    if name == "online_dpo":
        return pairs_by_hand(case)
    flat, out = case.rewards.reshape(-1).tolist(), []
    at = 0
    for i, length in enumerate(case.lengths.tolist()):
        group = flat[i // SAMPLES * SAMPLES : (i // SAMPLES + 1) * SAMPLES]
        r = flat[i]
        if name == "rloo":
            r -= (sum(group) - r) / (SAMPLES - 1)
        elif name in ("reinforce_baseline", "dr_grpo"):
            r -= statistics.fmean(group)
        elif name == "group_norm":
            r = (r - statistics.fmean(group)) / (statistics.stdev(group) + 1e-9)
        elif name == "flash_reinforce":
            r -= statistics.fmean(flat)
        elif name == "on_policy_distill":
            r = 0.0
        r = min(max(r, -2.0), 3.0)
        mask, kl, values = (x[at : at + length].tolist() for x in (case.mask, case.kl, case.values))
        token = [-0.2 * k if m else 0.0 for k, m in zip(kl, mask, strict=True)]
        if any(mask):
            token[max(t for t in range(length) if mask[t])] += r
        v = [x if m and name == "gae" else 0.0 for x, m in zip(values, mask, strict=True)] + [0.0]
        decay = lambd if name == "gae" else 1.0
        discount = gamma if name in ("gae", "reinforce") else 0.0 if name == "on_policy_distill" else 1.0
        row = []
        for t in range(length):
            terms = ((discount * decay) ** (s - t) * (token[s] + discount * v[s + 1] - v[s]) for s in range(t, length))
            row.append(sum(terms) if mask[t] else 0.0)
        out.append(row)
        at += length
    if name in ("gae", "reinforce", "reinforce_baseline"):
        flat_mask = case.mask.tolist()
        everything = [a for row in out for a in row]
        chosen = [a for a, m in zip(everything, flat_mask, strict=True) if m]
        mean = statistics.fmean(chosen)
        scale = 1 / math.sqrt(max(statistics.pvariance(chosen), 1e-8)) if divide else 1.0
        everything = [(a - mean) * scale if m else 0.0 for a, m in zip(everything, flat_mask, strict=True)]
        return [everything]
    return out


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "lambd", "divide"), [(1.0, 1.0, True), (0.9, 0.8, False)])
def test_equals_the_loops(name: str, seed: int, gamma: float, lambd: float, divide: bool) -> None:
    case = Case(seed)
    advantages, _ = estimate(name, case.rewards, case.lengths, values=case.values, gamma=gamma, lambd=lambd, **case.arguments)
    found = whiten(advantages, case.mask, divide) if ESTIMATORS[name].whitens else advantages
    expected = [a for row in by_hand(name, case, gamma, lambd, divide) for a in row]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, estimator in ESTIMATORS.items() if not estimator.whole_batch])
def test_parts_make_the_whole(name: str) -> None:
    """Groups do not see one another until advantages are whitened. (The estimator left out takes the mean of all rewards.)"""
    case = Case(7)
    whole = estimate(name, case.rewards, case.lengths, values=case.values, **case.arguments)[0]
    cut = 2 * SAMPLES
    at = int(case.lengths[:cut].sum())
    parts = []
    for groups, samples, tokens in ((slice(0, 2), slice(0, cut), slice(0, at)), (slice(2, None), slice(cut, None), slice(at, None))):
        arguments = {**case.arguments, "kl": case.kl[tokens], "mask": case.mask[tokens]}
        parts.append(estimate(name, case.rewards[groups], case.lengths[samples], values=case.values[tokens], **arguments)[0])
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-10)


def test_returns_are_what_the_critic_learns() -> None:
    case = Case()
    advantages, returns = estimate("gae", case.rewards, case.lengths, values=case.values, gamma=0.9, lambd=0.7, **case.arguments)
    np.testing.assert_allclose(returns[case.mask], (advantages + case.values)[case.mask])
    assert not returns[~case.mask].any()
    advantages, returns = estimate("rloo", case.rewards, case.lengths, **case.arguments)
    np.testing.assert_array_equal(returns, advantages)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_missing_reward_is_missing_in_its_own_tokens_only(name: str) -> None:
    case = Case()
    case.rewards[2, 1] = np.nan
    lengths = case.lengths
    advantages, _ = estimate(name, case.rewards, lengths, values=np.zeros(int(lengths.sum())))
    found = whiten(advantages) if ESTIMATORS[name].whitens else advantages
    owner = np.repeat(np.arange(len(lengths)), lengths)
    np.testing.assert_array_equal(np.isnan(found), owner == 2 * SAMPLES + 1)


def test_gamma_is_for_those_that_discount() -> None:
    case = Case()
    for name in ESTIMATORS:
        one, half = (estimate(name, case.rewards, case.lengths, values=case.values, gamma=g)[0] for g in (1.0, 0.5))
        assert np.array_equal(one, half) is not ESTIMATORS[name].discounts


def test_which_estimator_has_what() -> None:
    """As the launcher's help and code say."""
    assert {n for n, e in ESTIMATORS.items() if e.whitens} == {"gae", "reinforce", "reinforce_baseline"}
    compares = {"rloo", "reinforce_baseline", "group_norm", "dr_grpo", "online_dpo"}
    assert {n for n, e in ESTIMATORS.items() if e.least_samples > 1} == compares
    assert [n for n, e in ESTIMATORS.items() if e.critic] == ["gae"]
    assert [n for n, e in ESTIMATORS.items() if e.teacher] == ["on_policy_distill"]
    assert [n for n, e in ESTIMATORS.items() if e.pairs] == ["online_dpo"]


def test_on_policy_distillation_follows_the_reverse_kl() -> None:
    """Over all responses of two tokens, weighted by their probability, the policy gradient of the first token's reward is that of
    -KL(policy ‖ teacher) at the first token, and that of the second token's is -KL at the second, given the first."""
    from torch import log_softmax, tensor
    from torch.autograd import grad

    rng = np.random.default_rng(4)
    theta = tensor(rng.normal(size=(4, 3)), requires_grad=True)  # logits of the first token, and of the second after each first
    teacher = log_softmax(tensor(rng.normal(size=(4, 3))), dim=-1)
    policy = log_softmax(theta, dim=-1)
    surrogate, exact = tensor(0.0).double(), -(policy[0].exp() * (policy[0] - teacher[0])).sum()
    for first in range(3):
        chance = policy[0, first].exp().detach()
        exact = exact - chance * (policy[1 + first].exp() * (policy[1 + first] - teacher[1 + first])).sum()
        for second in range(3):
            chosen = policy[0, first], policy[1 + first, second]
            kl = np.array([(policy[0, first] - teacher[0, first]).item(), (chosen[1] - teacher[1 + first, second]).item()])
            reward = np.array([[rng.normal()]])  # it must not matter
            advantages, _ = estimate("on_policy_distill", reward, np.array([2]), kl=kl, kl_coefficient=1.0)
            np.testing.assert_allclose(advantages, -kl)
            weight = (chosen[0] + chosen[1]).exp().detach()
            surrogate = surrogate + weight * sum(a * x for a, x in zip(advantages.tolist(), chosen, strict=True))
    np.testing.assert_allclose(grad(surrogate, theta, retain_graph=True)[0].numpy(), grad(exact, theta)[0].numpy(), atol=1e-12)


def test_online_dpo_has_the_gradient_of_dpo() -> None:
    """Of a table of logits: responses of random lengths to three prompts, one of which has equal rewards and so no pair."""
    import torch
    from torch.autograd import grad
    from torch.nn.functional import logsigmoid

    rng, beta = np.random.default_rng(5), 0.3
    theta = torch.tensor(rng.normal(size=(12, 9, 6)), requires_grad=True)  # (responses, positions, tokens)
    reference = torch.log_softmax(torch.tensor(rng.normal(size=(12, 9, 6))), -1)
    lengths = rng.integers(1, 10, 12)
    drawn = [torch.tensor(rng.integers(0, 6, n)) for n in lengths]

    def logprobs(table: torch.Tensor) -> list[torch.Tensor]:
        return [table[i, torch.arange(len(tokens)), tokens] for i, tokens in enumerate(drawn)]

    policy, base = logprobs(torch.log_softmax(theta, -1)), logprobs(reference)
    rewards = np.array([[0.0, 1.0, 0.5, 0.2], [1.0, 1.0, 1.0, 1.0], [3.0, -1.0, np.nan, 3.0]])
    gaps = [(mine - its).sum() for mine, its in zip(policy, base, strict=True)]
    exact = -(logsigmoid(beta * (gaps[1] - gaps[0])) + logsigmoid(beta * (gaps[8] - gaps[9]))) / 2
    kl = torch.cat([mine - its for mine, its in zip(policy, base, strict=True)]).detach().numpy()
    advantages, _ = estimate("online_dpo", rewards, lengths, kl=kl, kl_coefficient=beta)
    scored = ~np.isnan(advantages)
    surrogate = -(torch.tensor(advantages[scored]) * torch.cat(policy)[torch.tensor(scored)]).sum() / int(scored.sum())
    found, wanted = (grad(x, theta, retain_graph=True)[0].numpy() for x in (surrogate, exact))
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert np.abs(wanted).max() > 1e-3
