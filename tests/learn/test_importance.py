"""Corrections for the sampler's probabilities, against a loop over sequences written from the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.importance import GATES, UNITS, Correction, binary_kl, correction_weights, importance_weights
from rlhfless_ray.learn.losses import clipped_loss, token_ratios

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def tokens(lengths: list[int], seed: int = 0, spread: float = 0.7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    learner, sampler = -spread * torch.rand(2, sum(lengths), generator=generator, dtype=torch.float64) * 3
    return learner, sampler, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


def unit_value(unit: str, values: list[float], t: int, power: bool) -> float:
    """`values` are log-ratios (power) or divergences; what the unit of token t amounts to."""
    if unit == "token":
        found = values[t]
    elif unit == "sequence" and power:
        found = math.fsum(values)
    else:
        found = math.fsum(values) / len(values)
    return math.exp(found) if power else found


def by_hand(c: Correction, learner: list[float], sampler: list[float]) -> tuple[list[float], list[bool]]:
    log_ratio = [a - b for a, b in zip(learner, sampler, strict=True)]
    weights, changed = [], []
    for t in range(len(learner)):
        raw = unit_value(c.weight, log_ratio, t, power=True)
        w = min(max(raw, c.weight_low), c.weight_high)
        keep = True
        if c.gate == "ratio":
            keep = c.gate_low <= unit_value(c.gate_unit, log_ratio, t, power=True) <= c.gate_high
        elif c.gate != "off":
            pairs = [(math.exp(b), math.exp(a)) for a, b in zip(learner, sampler, strict=True)]
            if c.gate == "tv":
                each = [abs(p - q) for p, q in pairs]
            else:
                clamp = lambda x: min(max(x, 1e-6), 1 - 1e-6)  # noqa: E731
                pairs = [(clamp(p), clamp(q)) for p, q in pairs]
                each = [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in pairs]
            keep = unit_value(c.gate_unit, each, t, power=False) <= c.gate_high
        weights.append(w if keep else 0.0)
        changed.append(not keep or w != raw)
    return weights, changed


@given(LENGTHS, st.integers(0, 50), st.sampled_from(UNITS), st.sampled_from(GATES), st.sampled_from(UNITS), st.booleans())
@settings(max_examples=150, deadline=None)
def test_equals_the_loop(lengths: list[int], seed: int, weight: str, gate: str, unit: str, cut: bool) -> None:
    divergence = gate in ("tv", "binary_kl")
    low, high = (0.0, 0.1) if divergence else (0.7, 1.4)
    c = Correction(weight, 0.8 if cut else 0.0, 1.3 if cut else math.inf, gate, unit, low, high)
    learner, sampler, sequence = tokens(lengths, seed)
    weights, changed = correction_weights(c, learner, sampler, sequence, len(lengths))
    expected, expected_changed, at = [], [], 0
    for length in lengths:
        w, ch = by_hand(c, learner[at : at + length].tolist(), sampler[at : at + length].tolist())
        expected += w
        expected_changed += ch
        at += length
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    assert changed.tolist() == expected_changed


def test_flags_of_the_launcher() -> None:
    assert Correction.of_flags("off", "mask", "ratio", [0.5, 5.0]) is None
    assert Correction.of_flags("token", "clip", "ratio", [0.5, 5.0]) == Correction(weight_low=0.5, weight_high=5.0)  # tis
    assert Correction.of_flags("token", "clip", "ratio", [2.0]) == Correction(weight_high=2.0)
    icepop = Correction.of_flags("token", "mask", "ratio", [0.5, 5.0])
    assert icepop == Correction(gate="ratio", gate_low=0.5, gate_high=5.0)
    sequence = Correction.of_flags("seq", "mask", "ratio", [0.5, 5.0])
    assert sequence == Correction(gate="ratio", gate_unit="geometric", gate_low=0.5, gate_high=5.0)
    assert Correction.of_flags("seq", "mask", "tv", [0.05]) == Correction(gate="tv", gate_unit="geometric", gate_high=0.05)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("seq", "clip", "ratio", [0.5, 5]), "only a token's ratio"),
        (("token", "clip", "tv", [5]), "only a token's ratio"),
        (("token", "mask", "kl", [5]), "gating 'kl'"),
        (("geo", "mask", "ratio", [5]), "level 'geo'"),
        (("token", "cut", "ratio", [5]), "mode 'cut'"),
        (("seq", "mask", "tv", [0.5, 5]), "bounded from above only"),
        (("token", "mask", "ratio", [5, 0.5]), "above the upper"),
        (("token", "mask", "ratio", []), "one threshold or two"),
    ],
)
def test_flags_that_are_refused(flags: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction.of_flags(*flags)


def test_a_sequence_is_judged_as_one_and_keeps_its_tokens_weights() -> None:
    """Ratios e and 1/e have geometric mean 1 and stay; e² twice is left out as a whole."""
    learner, sampler = torch.zeros(4), torch.tensor([-1.0, 1.0, -2.0, -2.0])
    c = Correction.of_flags("seq", "mask", "ratio", [0.5, 5.0])
    assert c is not None
    weights, changed = correction_weights(c, learner, sampler, torch.tensor([0, 0, 1, 1]), 2)
    torch.testing.assert_close(weights, torch.tensor([math.e, 1 / math.e, 0.0, 0.0]))
    assert changed.tolist() == [False, False, True, True]


@pytest.mark.parametrize("unit", UNITS)
def test_an_overflowing_ratio_is_left_out_without_nan(unit: str) -> None:
    learner = torch.zeros(2, requires_grad=True)
    c = Correction(unit, gate="ratio", gate_unit=unit, gate_low=0.5, gate_high=5.0)
    weights, _ = correction_weights(c, learner, torch.tensor([-1000.0, 0.0]), torch.tensor([0, 1]), 2)
    assert weights.tolist() == [0.0, 1.0] and not weights.requires_grad
    (weights * learner.exp()).sum().backward()
    assert learner.grad.tolist() == [0.0, 1.0]


def test_micro_batches_of_whole_sequences_change_nothing() -> None:
    lengths = [3, 0, 5, 1, 4]
    learner, sampler, sequence = tokens(lengths, 3)
    for unit in UNITS:
        c = Correction(unit, weight_high=1.2, gate="binary_kl", gate_unit=unit, gate_high=0.2)
        whole, _ = correction_weights(c, learner, sampler, sequence, 5)
        parts = []
        for first, last in ((0, 2), (2, 5)):
            mine = (sequence >= first) & (sequence < last)
            parts.append(correction_weights(c, learner[mine], sampler[mine], sequence[mine] - first, last - first)[0])
        torch.testing.assert_close(torch.cat(parts), whole)


def test_binary_kl_is_that_of_two_coins() -> None:
    p, q = torch.tensor([0.3, 0.9, 0.5]), torch.tensor([0.6, 0.1, 0.5])
    exact = torch.distributions.kl_divergence(torch.distributions.Bernoulli(p), torch.distributions.Bernoulli(q))
    torch.testing.assert_close(binary_kl(p.log(), q.log()), exact)
    assert bool(torch.isfinite(binary_kl(torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0]))).all())


def test_half_precision_is_widened_and_empty_is_fine() -> None:
    x = torch.tensor([-1.0], dtype=torch.bfloat16)
    weights, _ = correction_weights(Correction(), x, x, torch.zeros(1, dtype=torch.int64), 1)
    assert weights.dtype == torch.float32
    nothing = torch.zeros(0)
    for unit in UNITS:
        c = Correction(unit, gate="ratio", gate_unit=unit)
        assert correction_weights(c, nothing, nothing, torch.zeros(0, dtype=torch.int64), 0)[0].shape == (0,)


@pytest.mark.parametrize("moved", [0.0, 0.05, 2.0], ids=["first optimizer step", "within the clip", "beyond the clip"])
def test_the_objective_is_decoupled_ppo(moved: float) -> None:
    """AReaL's objective (arXiv 2505.24298), over all three actions of a policy, for responses of an older version.

    The clip is measured from the proximal policy, the weights from the version that drew the action. So the expected gradient is that
    of the newest policy's reward in closed form, π(a)·(A(a) - mean of A), where the clip cuts nothing.
    """
    behavior, proximal = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([0.0, 1.0, -1.0], [0.5, 0.2, -0.3]))
    advantages = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    logits = (proximal + moved * torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)).requires_grad_()
    logprobs = logits.log_softmax(0)
    weights = importance_weights(proximal, behavior, math.inf)
    loss, clipped = clipped_loss(token_ratios(logprobs, proximal), advantages, 0.2, 0.2)
    objective = -(behavior.exp() * weights * loss).sum()
    ratio, clip = logprobs.exp() / proximal.exp(), (logprobs.exp() / proximal.exp()).clamp(0.8, 1.2)
    assert objective.item() == pytest.approx((proximal.exp() * torch.minimum(ratio * advantages, clip * advantages)).sum().item())
    objective.backward()
    policy = logprobs.exp().detach()
    wanted = policy * (advantages - (policy * advantages).sum())
    assert clipped.any() == (moved == 2.0)
    assert torch.allclose(logits.grad, wanted) == (moved < 2.0)
    coupled, _ = clipped_loss(token_ratios(logprobs.detach(), behavior), advantages, 0.2, 0.2)
    assert (behavior.exp() * coupled).sum().item() != pytest.approx(-objective.item()), (
        "clipped from the old version it is another objective"
    )
