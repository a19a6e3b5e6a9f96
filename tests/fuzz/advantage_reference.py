"""Advantages from the papers in plain Python floats: one response and one token at a time."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from tests.fuzz.sections import Read, of_kind

Rows = list[list[float]]  # a list of numbers for each response
NAN = math.nan

WHITENS = {
    **dict.fromkeys(("gae", "reinforce", "reinforce_baseline"), True),
    **dict.fromkeys(("rloo", "group_norm", "dr_grpo", "flash_reinforce", "on_policy_distill", "online_dpo"), False),
}


def mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def kl_rows(kl: Read, old: Rows, reference: Rows) -> Rows:
    """Return the KL penalty of each token (Schulman 2020)."""

    def estimate(d: float) -> float:
        ways = {"k1": lambda: d, "k2": lambda: d * d / 2, "k3": lambda: math.expm1(-d) + d}
        value: float = of_kind(kl.estimator, ways)()
        return value if kl.limit is None else min(max(value, -kl.limit), kl.limit)

    return [[estimate(p - q) for p, q in zip(*pair, strict=True)] for pair in zip(old, reference, strict=True)]


def penalized(reward: Read, rewards: list[list[float]], masks: list[list[bool]], truncated: list[bool], max_tokens: int) -> Rows:
    """Apply the length penalties: DAPO's (arXiv 2503.14476, equation 13), then ProRL's. Returns rewards (prompts, samples)."""
    samples, rows = len(rewards[0]), []
    for prompt, row in enumerate(rewards):
        found = []
        for sample, value in enumerate(row):
            mask, was_cut = masks[prompt * samples + sample], truncated[prompt * samples + sample]
            if reward.overlong_buffer_tokens is not None:
                own = [place for place, is_own in enumerate(mask) if is_own]
                length = (own[-1] - own[0] + 1 if own else 0) if reward.overlong_feedback else len(own)
                limit, buffer = reward.overlong_limit_tokens or max_tokens, reward.overlong_buffer_tokens
                over = min(max(length - (limit - buffer), 0), buffer)
                value = value - reward.overlong_penalty * over / buffer
            factor = reward.stop_properly_penalty
            if factor is not None and was_cut and not math.isnan(value):
                value = value * factor if factor >= 0 else factor
            found.append(value)
        rows.append(found)
    return rows


def differ(rewards: list[float]) -> bool:
    """Return whether some rewards differ by more than the rounding of sums."""
    return bool(rewards) and max(rewards) - min(rewards) > 1e-12 * max(map(abs, rewards))


def baselined(estimator: str, rewards: Rows) -> Rows:
    """Subtract the estimator's baseline. A missing reward is NaN and takes no part."""
    everything = [r for row in rewards for r in row if not math.isnan(r)]

    def centred(row: list[float], r: float) -> float:
        known = [x for x in row if not math.isnan(x)]
        return r - mean(known) if differ(known) else 0.0

    def normalized(row: list[float], r: float) -> float:
        known = [x for x in row if not math.isnan(x)]
        if not differ(known):
            return 0.0
        deviation = math.sqrt(math.fsum((x - mean(known)) ** 2 for x in known) / (len(known) - 1))
        return (r - mean(known)) / (deviation + 1e-9)

    def others(row: list[float], place: int) -> float:
        rest = [x for k, x in enumerate(row) if k != place and not math.isnan(x)]
        return row[place] - mean(rest) if rest else 0.0

    def one(row: list[float], k: int) -> float:
        r = row[k]
        if math.isnan(r):
            return NAN
        ways = {
            **dict.fromkeys(("gae", "reinforce", "online_dpo"), lambda: r),
            **dict.fromkeys(("reinforce_baseline", "dr_grpo"), lambda: centred(row, r)),
            "rloo": lambda: others(row, k),
            "group_norm": lambda: normalized(row, r),
            "flash_reinforce": lambda: r - mean(everything),
            "on_policy_distill": lambda: 0.0,
        }
        value: float = of_kind(estimator, ways)()
        return value

    return [[one(row, k) for k in range(len(row))] for row in rewards]


def advantages_of(
    algorithm: Read, reward: Read, rewards: Rows, masks: list[list[bool]], truncated: list[bool], max_tokens: int, *, kl: Rows | None,
    coefficient: float, values: Rows | None,
) -> tuple[Rows, Rows, list[float]]:  # fmt: skip
    """Return advantages and returns of each response's tokens, and each response's reward with its KL.

    `kl` and `values` have a number for each token of a response, those of the environment included.
    """
    section = algorithm.advantage
    shaped = baselined(section.estimator, penalized(reward, rewards, masks, truncated, max_tokens))
    if (bounds := reward.clip_range) is not None:
        shaped = [[r if math.isnan(r) else min(max(r, bounds[0]), bounds[1]) for r in row] for row in shaped]
    flat = [r for row in shaped for r in row]
    penalties = [[0.0] * len(mask) for mask in masks] if kl is None else [[coefficient * x for x in row] for row in kl]
    earned = [_earned(r, mask, penalty) for r, mask, penalty in zip(flat, masks, penalties, strict=True)]
    if section.estimator == "online_dpo":
        earned = _pairs(shaped, masks, kl, coefficient)
    advantages, returns = [], []
    for number, (rows, mask) in enumerate(zip(earned, masks, strict=True)):
        critic = [0.0] * len(mask) if values is None else [v if own else 0.0 for v, own in zip(values[number], mask, strict=True)]
        got = ([NAN] * len(mask),) * 2 if math.isnan(flat[number]) else _discounted(section, rows, critic)
        advantages.append([a if own else 0.0 for a, own in zip(got[0], mask, strict=True)])
        returns.append([g if own else 0.0 for g, own in zip(got[1], mask, strict=True)])
    totals = [math.fsum(row) if not math.isnan(r) or not any(mask) else NAN for r, row, mask in zip(flat, earned, masks, strict=True)]
    whitens = WHITENS[section.estimator] if section.whiten is None else section.whiten
    return _whitened(advantages, masks, section.normalize_std) if whitens else advantages, returns, totals


def _earned(reward: float, mask: list[bool], penalty: list[float]) -> list[float]:
    """Return each token's reward: the response's at its last own token, minus the KL penalty of every own token."""
    rows = [-p if own else 0.0 for p, own in zip(penalty, mask, strict=True)]
    if any(mask) and not math.isnan(reward):
        rows[max(place for place, own in enumerate(mask) if own)] += reward
    return rows


def _discounted(section: Read, rewards: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Return advantages and returns of one response. Only `gae` has values (arXiv 1506.02438, equation 16)."""
    size, gamma, lambd = len(rewards), section.gamma, section.lambd
    if section.estimator == "gae":
        deltas = [r + gamma * (values[t + 1] if t + 1 < size else 0.0) - values[t] for t, r in enumerate(rewards)]
        got = [math.fsum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, size)) for t in range(size)]
        return got, [a + v for a, v in zip(got, values, strict=True)]
    alone = section.estimator in ("on_policy_distill", "online_dpo")  # a token's reward is its own
    got = [rewards[t] if alone else math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, size)) for t in range(size)]
    return got, got


def _pairs(rewards: Rows, masks: list[list[bool]], kl: Rows | None, beta: float) -> Rows:
    """Return the factors of ∇log π in the gradient of DPO's loss (arXiv 2305.18290, equation 8), with the opposite sign.

    The loss of a step is a mean over its tokens, and DPO's is one over pairs.
    """
    samples = len(rewards[0])
    found = [[0.0] * len(mask) for mask in masks]
    tokens = sum(sum(mask) for mask, r in zip(masks, (r for row in rewards for r in row), strict=True) if not math.isnan(r))
    pairs = []
    for prompt, row in enumerate(rewards):
        known = [(r, -k) for k, r in enumerate(row) if not math.isnan(r)]
        if differ([r for r, _ in known]):
            best, worst = -max(known)[1], min(k for k, r in enumerate(row) if r == min(known)[0])
            pairs.append((prompt * samples + best, prompt * samples + worst))
    for best, worst in pairs:
        gap = [math.fsum(x for x, own in zip((kl or found)[i], masks[i], strict=True) if own) for i in (best, worst)]
        weight = beta / (1 + math.exp(beta * (gap[0] - gap[1]))) * tokens / len(pairs)
        for i, sign in ((best, 1), (worst, -1)):
            found[i] = [sign * weight if own else 0.0 for own in masks[i]]
    return found


def _whitened(advantages: Rows, masks: list[list[bool]], divides: bool) -> Rows:
    every = [a for row, mask in zip(advantages, masks, strict=True) for a, own in zip(row, mask, strict=True) if own and not math.isnan(a)]
    if not every:
        return advantages
    centre = mean(every)
    variance = mean([(a - centre) ** 2 for a in every])
    scale = 1 / math.sqrt(max(variance, 1e-8)) if divides else 1.0
    return [[(a - centre) * scale if own else 0.0 for a, own in zip(*pair, strict=True)] for pair in zip(advantages, masks, strict=True)]


def next_coefficient(kl: Read, coefficient: float, measured: float, samples: int) -> float:
    """Return the KL's coefficient after a step (Ziegler et al. 2019, section 2.2)."""
    if kl.target is None:
        return coefficient
    return coefficient * (1 + min(max(measured / kl.target - 1, -0.2), 0.2) * samples / kl.horizon)


def is_kept(scores: list[Any], low: str, high: str) -> bool:
    """Return whether the mean of decimal numbers is strictly between two others, in exact arithmetic. None: a missing score."""
    known = [Fraction(score) for score in scores if score is not None]
    return bool(known) and Fraction(low) < sum(known) / len(known) < Fraction(high)
