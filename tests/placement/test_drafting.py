"""How much to draft: the choice against brute force, and what is learned against what was simulated."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.drafting import (
    ALLOWED_LOSS,
    FORGET_AFTER,
    LONGEST_REST,
    MOST_TOKENS,
    TRIAL_STEPS,
    Acceptance,
    Attempts,
    Draft,
    Learned,
    StepTimes,
    choose_lengths,
)


def price(times: StepTimes) -> float:
    """Return the seconds that one drafted token adds to a step of one sequence."""
    return float(times.verify_s(1, np.array(1)))


def padded(survivals: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((len(survivals), MOST_TOKENS))
    for row, one in enumerate(survivals):
        found[row, : len(one)] = one
    return found


survival = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda chances: np.cumprod(chances))


def each(seconds: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda drafted: seconds * drafted


@given(
    st.lists(survival, min_size=1, max_size=4),
    st.floats(0.001, 1.0),
    st.floats(1e-5, 0.5),
    st.floats(0, 0.5),
    st.integers(0, 8),
    st.floats(0, 0.5),
)
def test_no_other_lengths_make_more_tokens_per_second(
    survivals: list[np.ndarray], step_s: float, verify_s: float, overhead_s: float, knot: int, beyond_s: float
) -> None:
    def added_s(drafted: Any) -> Any:
        return verify_s * drafted + beyond_s * np.maximum(0, drafted - knot)

    def rate(lengths: tuple[int, ...]) -> float:
        drafted = sum(lengths)
        tokens = len(survivals) + sum(float(part[:count].sum()) for part, count in zip(survivals, lengths, strict=True))
        return tokens / (step_s + added_s(drafted) + overhead_s * (drafted > 0))

    chosen = choose_lengths(padded(survivals), step_s, added_s, overhead_s)
    every = itertools.product(*(range(len(part) + 1) for part in survivals))
    assert rate(tuple(chosen)) >= max(map(rate, every)) * (1 - 1e-12)


def test_the_choice_changes_sign_with_the_batch() -> None:
    """A decode step that reads weights verifies a token for nearly nothing; one that computes does not (RLHFSpec, section 3)."""
    drafts = padded([np.array([0.5, 0.25])] * 64)
    assert choose_lengths(drafts[:1], 0.010, each(0.0005)) == [2]
    assert choose_lengths(drafts, 0.010 + 64 * 0.001, each(0.001)) == [0] * 64


def test_nothing_to_draft_is_nothing_drafted() -> None:
    assert choose_lengths(padded([]), 1.0, each(0.1)) == []
    assert choose_lengths(padded([np.zeros(0), np.zeros(0)]), 1.0, each(0.1)) == [0, 0]
    assert choose_lengths(padded([np.zeros(0), np.array([0.9])]), 1.0, each(0.1)) == [0, 1]
    assert choose_lengths(padded([np.array([0.9])]), 1.0, each(0.1), sequences=20) == [0], "the step's other sequences wait for it"


def test_acceptance_approaches_the_true_chances_and_follows_them_when_they_change() -> None:
    rng = np.random.default_rng(0)
    learned = Acceptance()
    draft = Draft(tokens=[1, 2, 3], estimates=[0.9, 0.9, 0.9], match=6)
    assert learned.survival([draft])[0, :3] == pytest.approx([0.9, 0.81, 0.729]), "the source's own estimates, before any evidence"
    for chance in (0.3, 0.8):
        for _ in range(FORGET_AFTER // 32):
            accepted = np.cumprod(rng.random((32, 3)) < chance, axis=1).sum(axis=1)
            learned.observe([draft] * 32, [3] * 32, accepted.tolist())
        assert learned.survival([draft])[0, :3] == pytest.approx(np.cumprod([chance] * 3), abs=0.05)
    other = Draft(tokens=[1], estimates=[0.2], match=1)
    assert learned.survival([other])[0, :1] == pytest.approx([0.2]), "other matches and estimates are cells of their own"


def test_a_refused_token_says_nothing_of_those_behind_it() -> None:
    learned = Acceptance()
    draft = Draft(tokens=[1, 2, 3], estimates=[0.5, 0.6, 0.7], match=2)
    for _ in range(100):
        learned.observe([draft] * 100, [3] * 100, [0] * 100)
    chances = learned.survival([draft])[0]
    assert chances[0] < 0.01
    assert chances[1] / chances[0] == pytest.approx(0.6) and chances[2] / chances[1] == pytest.approx(0.7)


def test_step_times_are_recovered_with_noise_and_hiccups() -> None:
    rng, times = np.random.default_rng(1), StepTimes()
    assert times.step_s(4, 100) is None and price(times) == 0.0 and not times.is_known
    for _ in range(4 * StepTimes.KEPT):
        running, context = int(rng.integers(1, 65)), int(rng.integers(100, 10_000))
        drafted = int(rng.integers(0, 200)) * (rng.random() < 0.6)
        verifies = drafted > 0 or rng.random() < 0.3
        seconds = 0.003 + 5e-5 * running + 2e-7 * context + 1e-5 * drafted + 2e-4 * verifies
        times.observe(running, context, drafted, seconds * rng.normal(1, 0.05) * (50 if rng.random() < 0.02 else 1), verifies)
    times.fit()
    assert times.step_s(32, 5000) == pytest.approx(0.003 + 32 * 5e-5 + 5000 * 2e-7, rel=0.05)
    assert times.verify_s(32, np.array(100)) == pytest.approx(100 * 1e-5, rel=0.15) and times.path_s == pytest.approx(2e-4, rel=0.5)
    assert sum(map(len, times.steps)) <= 2 * StepTimes.KEPT and times.is_known
    before = price(times)
    times.steps[1].clear()
    for _ in range(4 * StepTimes.KEPT):
        times.observe(8, 800, 0, 0.004)
    assert price(times) == pytest.approx(before, rel=0.01), "a price is kept while nothing is drafted"


def test_a_term_that_never_varied_is_not_invented() -> None:
    times = StepTimes()
    for _ in range(StepTimes.FIRST):
        times.observe(8, 800, 0, 0.004)
    assert times.step_s(8, 800) == pytest.approx(0.004, rel=0.02)
    assert price(times) == 0.0


def test_drafts_are_cheap_while_a_step_reads_weights_and_dear_while_it_computes() -> None:
    """Fitted to one engine's full steps and its tail, in turn."""
    rng, times = np.random.default_rng(2), StepTimes()

    def seconds(rows: int) -> float:
        return 0.010 + 0.0001 * rows + 0.0012 * max(0, rows - 8)

    for _ in range(4 * StepTimes.KEPT):
        running = int(rng.choice([1, 4, 64]))
        drafted = int(rng.integers(0, 30)) * (rng.random() < 0.5)
        times.observe(running, 100 * running, drafted, seconds(running + drafted) * rng.normal(1, 0.03))
    times.fit()
    for running in (1, 4, 64):
        wanted = [seconds(running + drafted) - seconds(running) for drafted in (4, 16)]
        assert times.verify_s(running, np.array([4, 16])) == pytest.approx(wanted, rel=0.25, abs=5e-4)
    drafts = [np.array([0.6, 0.36])] * 64
    few, many = (choose_lengths(padded(drafts[:n]), seconds(n), partial(times.verify_s, n), times.path_s, n) for n in (1, 64))
    assert few == [2] and many == [0] * 64


def test_what_was_learned_comes_back_from_a_state_and_from_news() -> None:
    one, other = Learned(), Learned()
    drafts = [Draft([1, 2], [0.9, 0.4], 3), Draft([3], [0.7], 0, source=1)]
    for draft in drafts:
        one.acceptance.observe([draft], [len(draft.tokens)], [1])
    other.acceptance.merge(one.acceptance.take_news())
    assert one.acceptance.take_news() == []
    assert (other.acceptance.survival(drafts) == one.acceptance.survival(drafts)).all()
    for k in range(64):
        one.times.observe(4, 100, k % 3, 0.01 + 0.001 * (k % 3))
    third = Learned()
    third.restore(json.loads(json.dumps(one.state())))
    assert price(third.times) == price(one.times) > 0 and third.times.is_known
    assert (third.acceptance.survival(drafts) == one.acceptance.survival(drafts)).all()
    before = third.state()
    third.restore({})
    assert third.state() == before
    third.restore({**before, "terms": [3e-3, 2e-5, 0.0, 2e-5, 1e-4]})  # of an older checkpoint
    assert price(third.times) == pytest.approx(2e-5) and third.times.path_s == 1e-4


TERMS = np.array([3e-3, 2e-5, 0.0, 2e-5, 1e-4, 0.0, 0.0])


def attempt(chance: float, steps: int, running: int = 16, look_up_s: float = 5e-5) -> tuple[float, Attempts]:
    """Decode with drafts that are accepted with a chance, and return the speed over decoding without drafts."""
    rng, learned = np.random.default_rng(0), Learned()
    learned.times.terms, learned.times.trials = TERMS, TRIAL_STEPS
    attempts, names = Attempts(learned), [str(i) for i in range(running)]
    draft, offered = Draft([1] * 8, [0.9] * 8, 4), dict[str, int]()
    plain_s = learned.times.step_s(running, 0) or 0.0
    taken_s, tokens = 0.0, 0
    for _ in range(steps):
        most = attempts.begin_step(running, 0)
        drafted = sum(offered.values())
        got = [int(np.argmin([*(rng.random(count) < chance), False])) for count in offered.values()]
        learned.acceptance.observe([draft] * len(got), [*offered.values()], got)
        for name, count in zip(offered, got, strict=True):
            attempts.note(name, count > 0)
        accepted = sum(got)
        due = attempts.due(names, most)
        draft_s = look_up_s * len(due)
        if due:
            attempts.observe_look_up(draft_s, len(due))
        used = bool(drafted or due)
        attempts.settle(running, 0, drafted, accepted, draft_s)
        survivals = learned.acceptance.survival([draft] * len(due))
        verify_s = partial(learned.times.verify_s, running)
        chosen = choose_lengths(survivals, plain_s, verify_s, learned.times.path_s, running) if due else []
        offered = {names[i]: count for i, count in zip(due, chosen, strict=True) if count}
        for i, count in zip(due, chosen, strict=True):
            if not count:
                attempts.note(names[i], False)
        taken_s += plain_s + float(verify_s(np.array(drafted))) + used * learned.times.path_s + draft_s
        tokens += running + accepted
    return tokens / taken_s / (running / plain_s), attempts


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.15, 0.5, 0.95])
@pytest.mark.parametrize("running", [1, 16, 64])
def test_attempts_lose_next_to_nothing_and_gain_where_there_is_a_gain(chance: float, running: int) -> None:
    speed, _ = attempt(chance, 800, running)
    assert speed > 0.99 - ALLOWED_LOSS
    if chance == 0.95:
        assert speed > 1.5


def test_nothing_is_looked_up_in_debt() -> None:
    learned = Learned()
    learned.times.terms, learned.times.trials = TERMS, TRIAL_STEPS
    attempts = Attempts(learned)
    attempts.observe_look_up(5e-5, 1)
    attempts.balance = -1.0
    assert attempts.begin_step(64, 0) == 0
    attempts.balance = 1.0
    assert 0 < attempts.begin_step(64, 0) <= 64
    attempts.note("a", False)
    attempts.note("a", False)
    attempts.forget("a")
    assert attempts.due(["a"], 1) == [0]


def test_sequences_whose_drafts_fail_rest_longer_and_longer() -> None:
    _, attempts = attempt(0.0, 500)
    assert max(rest for _, rest in attempts.rests.values()) > 2
    attempts = Attempts(Learned())
    attempts.number = 10
    for _ in range(10):
        attempts.note("a", False)
    assert attempts.rests["a"] == (10 + LONGEST_REST, LONGEST_REST)
    attempts.note("b", False)
    assert attempts.due(["a", "b", "c"], 3) == [2]
    attempts.number = 11
    assert attempts.due(["a", "b", "c"], 1) == [2], "those that did best come first"
    attempts.note("a", True)
    assert attempts.due(["a", "b", "c"], 3) == [0, 1, 2]
    attempts.forget_all_but(["b"])
    assert set(attempts.rests) == {"b"}
