"""How much to draft: the choice against brute force, and what is learned against what was simulated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.drafting import FORGET_AFTER, Acceptance, Draft, StepTimes, choose_lengths

survival = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda chances: np.cumprod(chances))


@given(st.lists(survival, min_size=1, max_size=4), st.floats(0.001, 1.0), st.floats(1e-5, 0.5), st.floats(0, 0.5))
def test_no_other_lengths_make_more_tokens_per_second(
    survivals: list[np.ndarray], step_s: float, verify_s: float, overhead_s: float
) -> None:
    def rate(lengths: tuple[int, ...]) -> float:
        drafted = sum(lengths)
        tokens = len(survivals) + sum(float(part[:count].sum()) for part, count in zip(survivals, lengths, strict=True))
        return tokens / (step_s + verify_s * drafted + overhead_s * (drafted > 0))

    chosen = choose_lengths(survivals, step_s, verify_s, overhead_s)
    every = itertools.product(*(range(len(part) + 1) for part in survivals))
    assert rate(tuple(chosen)) >= max(map(rate, every)) * (1 - 1e-12)


def test_the_choice_changes_sign_with_the_batch() -> None:
    """A decode step that reads weights verifies a token for nearly nothing; one that computes does not (RLHFSpec, section 3)."""
    drafts = [np.array([0.5, 0.25])] * 64
    assert choose_lengths(drafts[:1], 0.010, 0.0005) == [2]
    assert choose_lengths(drafts, 0.010 + 64 * 0.001, 0.001) == [0] * 64


def test_nothing_to_draft_is_nothing_drafted() -> None:
    assert choose_lengths([], 1.0, 0.1) == []
    assert choose_lengths([np.zeros(0), np.zeros(0)], 1.0, 0.1) == [0, 0]
    assert choose_lengths([np.zeros(0), np.array([0.9])], 1.0, 0.1) == [0, 1]


def test_acceptance_approaches_the_true_chances_and_follows_them_when_they_change() -> None:
    rng = np.random.default_rng(0)
    learned = Acceptance()
    draft = Draft(tokens=[1, 2, 3], estimates=[0.9, 0.9, 0.9], match=6)
    assert learned.survival(draft) == pytest.approx([0.9, 0.81, 0.729]), "the source's own estimates, before any evidence"
    for chance in (0.3, 0.8):
        for _ in range(FORGET_AFTER):
            accepted = int(np.argmin([*(rng.random(3) < chance), False]))
            learned.observe(draft, 3, accepted)
        assert learned.survival(draft) == pytest.approx(np.cumprod([chance] * 3), abs=0.05)
    other = Draft(tokens=[1], estimates=[0.2], match=1)
    assert learned.survival(other) == pytest.approx([0.2]), "other matches and estimates are cells of their own"


def test_a_refused_token_says_nothing_of_those_behind_it() -> None:
    learned = Acceptance()
    draft = Draft(tokens=[1, 2, 3], estimates=[0.5, 0.6, 0.7], match=2)
    for _ in range(10_000):
        learned.observe(draft, 3, 0)
    chances = learned.survival(draft)
    assert chances[0] < 0.01
    assert chances[1] / chances[0] == pytest.approx(0.6) and chances[2] / chances[1] == pytest.approx(0.7)


def test_step_times_are_recovered_with_noise_and_hiccups() -> None:
    rng, times = np.random.default_rng(1), StepTimes()
    assert times.step_s(4, 100) is None and times.verify_s == 0.0
    for _ in range(StepTimes.KEPT):
        running, context, drafted = int(rng.integers(1, 65)), int(rng.integers(100, 10_000)), int(rng.integers(0, 200))
        seconds = 0.003 + 5e-5 * running + 2e-7 * context + 1e-5 * drafted
        times.observe(running, context, drafted, seconds * rng.normal(1, 0.05) * (50 if rng.random() < 0.02 else 1))
    assert times.step_s(32, 5000) == pytest.approx(0.003 + 32 * 5e-5 + 5000 * 2e-7, rel=0.05)
    assert times.verify_s == pytest.approx(1e-5, rel=0.15)
    assert len(times.rows) <= StepTimes.KEPT + StepTimes.EVERY


def test_a_term_that_never_varied_is_not_invented() -> None:
    times = StepTimes()
    for _ in range(StepTimes.EVERY):
        times.observe(8, 800, 0, 0.004)
    assert times.step_s(8, 800) == pytest.approx(0.004, rel=0.01)
    assert times.verify_s == 0.0
