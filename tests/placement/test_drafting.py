"""How much to draft: the choice against brute force, and what is learned against what was simulated."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.drafting.acceptance import (
    ESTIMATE_BUCKETS,
    FORGET_AFTER,
    HALF_LIFE,
    MATCH_EDGES,
    MOST_TOKENS,
    POSITION_EDGES,
    Acceptance,
    Draft,
    Drafts,
    DraftTable,
    choose_lengths,
)
from placement.drafting.attempts import LONGEST_REST, OPTIMISM, Attempts, Learned
from placement.drafting.step_times import TRIAL_STEPS, StepTimes


def price(times: StepTimes) -> float:
    """Return the seconds that one drafted token adds to a step of one sequence."""
    return float(times.verify_s(1, np.array(1)))


def table(*drafts: Draft) -> DraftTable:
    return Acceptance.tabulate(Drafts.of(drafts))


def padded(survivals: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((len(survivals), MOST_TOKENS))
    for row, one in enumerate(survivals):
        found[row, : len(one)] = one
    return found


survival = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda chances: np.cumprod(chances))


def each(seconds: float) -> np.ndarray:
    return seconds * np.arange(1, 64 * MOST_TOKENS + 1)


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

    chosen = choose_lengths(padded(survivals), step_s, added_s(np.arange(1, 4 * MOST_TOKENS + 1)), overhead_s)
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
    assert learned.survival(table(draft))[0, :3] == pytest.approx([0.9, 0.81, 0.729]), "the source's own estimates, before any evidence"
    for chance in (0.3, 0.8):
        for _ in range(FORGET_AFTER // 32):
            accepted = np.cumprod(rng.random((32, 3)) < chance, axis=1).sum(axis=1)
            learned.observe(table(*[draft] * 32).cells, [3] * 32, accepted.tolist())
        assert learned.survival(table(draft))[0, :3] == pytest.approx(np.cumprod([chance] * 3), abs=0.05)
    other = Draft(tokens=[1], estimates=[0.2], match=1)
    assert learned.survival(table(other))[0, :1] == pytest.approx([0.2]), "other matches and estimates are cells of their own"


def test_a_refused_token_says_nothing_of_those_behind_it() -> None:
    learned = Acceptance()
    draft = Draft(tokens=[1, 2, 3], estimates=[0.5, 0.6, 0.7], match=2)
    for _ in range(100):
        learned.observe(table(*[draft] * 100).cells, [3] * 100, [0] * 100)
    chances = learned.survival(table(draft))[0]
    assert chances[0] < 0.01
    assert chances[1] / chances[0] == pytest.approx(0.6) and chances[2] / chances[1] == pytest.approx(0.7)


def test_step_times_are_recovered_with_noise_and_hiccups() -> None:
    rng, times = np.random.default_rng(1), StepTimes()
    assert times.step_s(4, 100) is None and price(times) == 0.0 and not times.is_known
    for _ in range(4 * StepTimes.KEPT):
        running, context = int(rng.integers(1, 65)), int(rng.integers(100, 10_000))
        drafted = int(rng.integers(0, 200)) * (rng.random() < 0.6)
        seconds = 0.003 + 5e-5 * running + 2e-7 * context + 1e-5 * drafted + 2e-4 * (drafted > 0)
        times.observe(running, context, drafted, seconds * rng.normal(1, 0.05) * (50 if rng.random() < 0.02 else 1))
    times.fit()
    assert times.step_s(32, 5000) == pytest.approx(0.003 + 32 * 5e-5 + 5000 * 2e-7, rel=0.05)
    assert times.verify_s(32, np.array(100)) == pytest.approx(100 * 1e-5, rel=0.15) and times.path_s == pytest.approx(2e-4, rel=0.5)
    assert sum(map(len, times.steps)) <= 2 * StepTimes.KEPT and times.is_known
    before = price(times)
    times.steps[1].clear()
    for _ in range(4 * StepTimes.KEPT):
        times.observe(8, 800, 0, 0.004)
    assert price(times) == pytest.approx(before, rel=0.1), "a price is kept while nothing is drafted"


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
    few, many = (choose_lengths(padded(drafts[:n]), seconds(n), times.costs_s(n), times.path_s, n) for n in (1, 64))
    assert few == [2] and many == [0] * 64


def survival_of(acceptance: Acceptance, draft: Draft, deviations: float) -> list[float]:
    """Return what `Acceptance.survival` gives for one draft, token by token."""
    found, left = [], 1.0
    for position, estimate in enumerate(draft.estimates):
        cell = cell_of(draft, position)
        weight = 4 + acceptance.tried[cell]
        chance = (4 * estimate + acceptance.accepted[cell]) / weight
        chance += deviations * math.sqrt(chance * max(1 - chance, 0) / (weight + 1))
        left *= min(chance, 1.0)
        found.append(left)
    return found


def cell_of(draft: Draft, position: int) -> int:
    match, place = (sum(value >= edge for edge in edges) for value, edges in ((draft.match, MATCH_EDGES), (position, POSITION_EDGES)))
    bucket = min(int(draft.estimates[position] * ESTIMATE_BUCKETS), ESTIMATE_BUCKETS - 1)
    return int(np.ravel_multi_index((draft.source, match, place, bucket), Acceptance.SHAPE))


def test_choices_from_tables_are_those_from_single_tokens() -> None:
    """Rows without a draft, padding and costs of other widths must not change what is learned or chosen, to the last bit."""
    rng, learned = np.random.default_rng(4), Learned()
    learned.times.terms, learned.times.trials = np.array([3e-3, 2e-5, 0.0, 2e-5, 1e-4, 1e-5, 2e-5]), TRIAL_STEPS
    other, attempts, tried, accepted = StepTimes(), Attempts(learned), *np.zeros((2, len(learned.acceptance.tried)))
    other.terms = learned.times.terms
    for _ in range(60):
        counts = rng.integers(0, MOST_TOKENS + 1, 12).tolist()
        drafts = [Draft([7] * n, rng.uniform(0.1, 1, n).tolist(), int(rng.integers(12)), int(rng.integers(2))) for n in counts]
        lengths = attempts.choose(table(*drafts), 12, 0)
        singly = padded([np.array(survival_of(learned.acceptance, draft, OPTIMISM)) for draft in drafts])
        step_s, costs_s = learned.times.step_s(12, 0), learned.times.verify_s(12, np.arange(1, 12 * MOST_TOKENS + 1))
        assert step_s is not None
        assert lengths == choose_lengths(singly, step_s, costs_s, learned.times.path_s, 12)
        verified = [row for row, n in enumerate(lengths) if n]
        hits = [int(rng.integers(lengths[row] + 1)) for row in verified]
        learned.acceptance.observe(table(*drafts).cells[verified], [lengths[row] for row in verified], hits)
        for row, hit in zip(verified, hits, strict=True):
            for position in range(min(hit + 1, lengths[row])):
                tried[cell_of(drafts[row], position)] += 1
                accepted[cell_of(drafts[row], position)] += position < hit
        assert (learned.acceptance.tried == tried).all() and (learned.acceptance.accepted == accepted).all() and tried.any()
        drafted, gained = sum(lengths), sum(hits)
        assert learned.times.saved_s(12, 0, drafted, gained) == other.saved_s(12, 0, drafted, gained)


def test_what_was_learned_comes_back_from_a_state_and_from_news() -> None:
    one, other = Learned(), Learned()
    drafts = [Draft([1, 2], [0.9, 0.4], 3), Draft([3], [0.7], 0, source=1)]
    for draft in drafts:
        one.acceptance.observe(table(draft).cells, [len(draft.tokens)], [1])
    other.acceptance.merge(one.acceptance.take_news())
    assert one.acceptance.take_news() == []
    assert (other.acceptance.survival(table(*drafts)) == one.acceptance.survival(table(*drafts))).all()
    for k in range(64):
        one.times.observe(4, 100, k % 3, 0.01 + 0.001 * (k % 3))
    third = Learned()
    third.restore(json.loads(json.dumps(one.state())))
    assert price(third.times) == price(one.times) > 0 and third.times.is_known
    assert (third.acceptance.survival(table(*drafts)) == one.acceptance.survival(table(*drafts))).all()
    before = third.state()
    third.restore({})
    assert third.state() == before
    third.restore({**before, "terms": [3e-3, 2e-5, 0.0, 2e-5, 1e-4]})  # of an older checkpoint
    assert price(third.times) == pytest.approx(2e-5) and third.times.path_s == 1e-4


TERMS = np.array([3e-3, 2e-5, 0.0, 2e-5, 1e-4, 0.0, 0.0])


@dataclass(frozen=True)
class Engine:
    """A simulated engine's times in steps of one sequence, and how often what is drafted is what is drawn.

    path, token, row: what verifying at all adds, what a drafted token adds, and what each of `free` and more rows adds. found: share of
    the look-ups that find a draft. chance: of a drafted token, by the share of the steps done. estimate: what the source says of it.
    noise: standard deviation of the logarithm of a measured time. busy: factor of measured times, by the share of the steps done.
    """

    path: float = 0.25
    token: float = 0.01
    row: float = 0.015
    free: int = 8
    look_up: float = 0.04
    found: float = 0.8
    chance: Callable[[float], float] = lambda done: 0.5
    estimate: float = 0.5
    noise: float = 0.1
    busy: Callable[[float], float] = lambda done: 1.0

    def step_s(self, running: int, drafted: int) -> float:
        rows = running + drafted
        return 0.003 * (1 + 0.03 * running + self.token * drafted + self.path * (drafted > 0) + self.row * max(0, rows - self.free))


def speeds(engine: Engine, running: int | Sequence[int], steps: int = 900, longest: int = 8) -> tuple[float, float]:
    """Decode with `auto` and with `on`, and return their tokens per second over those without drafts.

    running: sequences of each step, in turn.
    """
    turns = [running] if isinstance(running, int) else list(running)
    found = []
    for always in (False, True):
        rng, learned = np.random.default_rng(0), Learned()
        attempts, offered = Attempts(learned), dict[str, int]()
        draft, nothing = Draft([1] * longest, [engine.estimate] * longest, 4), Draft([], [], 0)
        spent_s = gained_s = 0.0
        for number in range(steps):
            count, done = turns[number % len(turns)], number / steps
            names = [str(i) for i in range(count)]
            offered = {name: length for name, length in offered.items() if name in names}
            drafted = sum(offered.values())
            right = iter((rng.random(drafted) < engine.chance(done)).tolist())
            hits = [[*islice(right, length), False].index(False) for length in offered.values()]
            accepted = sum(hits)
            if offered and not always:
                learned.acceptance.observe(table(*[draft] * len(hits)).cells, [*offered.values()], hits)
            work_s = engine.step_s(count, drafted)
            if not always and attempts.skip_step():
                spent_s += work_s
                gained_s += work_s
                continue
            most = count if always else attempts.begin_step(count, 100 * count)
            due = [names[i] for i in range(count)] if always else [names[i] for i in attempts.due(names, most)] if most else []
            if most and not due:
                attempts.pause_until_due(names)
            drafts = [draft if rng.random() < engine.found else nothing for _ in due]
            chosen = [len(one.tokens) for one in drafts] if always else attempts.choose(table(*drafts), count, 100 * count) if due else []
            draft_s = 0.003 * engine.look_up * len(due) * (0.15 + 0.85 / max(count, 1))
            measured_s = work_s * engine.busy(done) * np.exp(rng.normal(0, engine.noise))
            if not always:
                attempts.note(due, [name for name, length in zip(due, chosen, strict=True) if length])
                if due:
                    attempts.observe_look_up(draft_s * engine.busy(done), len(due))
                learned.times.observe(count, 100 * count, drafted, measured_s)
                attempts.settle(count, 100 * count, drafted, accepted, draft_s * engine.busy(done))
            offered = {name: length for name, length in zip(due, chosen, strict=True) if length}
            spent_s += work_s + draft_s
            gained_s += engine.step_s(count, 0) * (count + accepted) / count
        found.append(gained_s / spent_s)
    return found[0], found[1]


CASES = {
    "as measured": Engine(),
    "rarely right": Engine(chance=lambda done: 0.25),
    "never right": Engine(chance=lambda done: 0.02),
    "nearly always right": Engine(chance=lambda done: 0.9, estimate=0.9),
    "seldom found": Engine(found=0.1, chance=lambda done: 0.8),
    "the source promises too much": Engine(chance=lambda done: 0.1, estimate=0.9),
    "the source promises too little": Engine(chance=lambda done: 0.8, estimate=0.15),
    "right later": Engine(chance=lambda done: 0.02 if done < 0.3 else 0.7),
    "right at first": Engine(chance=lambda done: 0.7 if done < 0.5 else 0.02),
    "dear path": Engine(path=0.7),
    "dear look-ups": Engine(look_up=0.3),
    "free": Engine(path=0.02, token=0.005, row=0.005, free=128, look_up=0.01),
    "a core that computes": Engine(path=0.05, token=0.12, row=0.0, free=8, look_up=0.01),
    "noise": Engine(noise=0.5),
    "a machine that is busy at first": Engine(busy=lambda done: 2.0 if done < 0.2 else 1.0, noise=0.2),
    "a machine that is busy in turn": Engine(busy=lambda done: 1.5 if int(done * 40) % 2 else 1.0, noise=0.2),
}

BOTH = ("as measured", "never right", "right later", "the source promises too little")  # also tried with one sequence

TAIL = [16] * 8 + [8] * 4 + [4] * 6 + [2] * 6 + [1] * 10


@pytest.mark.parametrize("case", CASES)
def test_auto_is_about_as_fast_as_the_better_of_on_and_off(case: str) -> None:
    """Within 4 %, with all that it takes to learn times and acceptance. Trials and reading may cost 1 %."""
    for running in (1, TAIL) if case in BOTH else (TAIL,):
        auto, on = speeds(CASES[case], running)
        assert auto > 0.96 * max(on, 1.0), running


def test_never_as_slow_as_on_in_wide_steps() -> None:
    auto, on = speeds(CASES["never right"], 64, 800)
    assert auto > 0.98 and on < 0.5


def test_nothing_is_looked_up_in_debt() -> None:
    learned = Learned()
    learned.times.terms, learned.times.trials = TERMS, TRIAL_STEPS
    attempts = Attempts(learned)
    attempts.observe_look_up(5e-5, 1)
    attempts.balance = -1.0
    assert attempts.begin_step(64, 0) == 0
    assert attempts.choose(table(Draft([1], [0.9], 4)), 1, 0) == [1], "what is expected to pay is verified in any case"
    attempts.balance = 1.0
    assert 0 < attempts.begin_step(64, 0) <= 64
    attempts.note(["a"], [])
    attempts.note(["a"], [])
    attempts.forget("a")
    assert attempts.due(["a"], 1) == [0]


def test_a_pause_skips_only_steps_after_which_nothing_is_looked_up() -> None:
    """The steps' times are known, so an engine that decides in each step looks up the same sequences after the same steps."""
    engines, names, skipped = [], [*"abcdef"], 0
    for _ in range(2):
        learned = Learned()
        learned.times.terms, learned.times.trials = TERMS, TRIAL_STEPS
        engines.append(Attempts(learned))
    for step in range(3000):
        found = []
        for attempts in engines:
            if attempts is engines[0] and attempts.skip_step():
                skipped += 1
                found.append(([], None))
                continue
            most = attempts.begin_step(6, 600)
            due = attempts.due(names, most) if most else []
            if most and not due:
                attempts.pause_until_due(names)
            helped = [names[i] for i in due if (step * 7 + i * 3) % 11 == 0 and step % 1000 < 300]
            attempts.note([names[i] for i in due], helped)
            if due:
                attempts.observe_look_up(1e-4 * len(due), len(due))
            attempts.settle(6, 600, len(helped), len(helped), 1e-4 * len(due))
            found.append((due, attempts.may_read))
        (due, may_read), (expected, may_read_expected) = found
        assert due == expected and may_read in (None, may_read_expected), step
    assert 1000 < skipped < 2990
    assert engines[0].may_read == engines[1].may_read  # adds the steps that are still only counted
    assert engines[0].balance == pytest.approx(engines[1].balance)


def decided(attempts: Attempts, running: int, steps: int, most_value: float = 1.0) -> tuple[int, int]:
    """Return in how many of these steps, in each of which a sequence begins, an engine decides, and for how many sequences it looks up."""
    number = looked_up = 0
    for _ in range(steps):
        if not attempts.skip_step(has_begun=True):
            number += 1
            looked_up += attempts.begin_step(running, 100 * running, most_value)
    return number, looked_up


def test_a_batch_too_large_to_gain_is_decided_on_once_in_sixteen_steps() -> None:
    """A drafted token takes as long as one of another sequence. Only where it is worth more than that, drafts are looked up."""
    learned = Learned()
    learned.times.terms, learned.times.trials = np.array([1e-3, 1e-4, 0, 2e-4, 0, 0, 0]), TRIAL_STEPS
    attempts = Attempts(learned)
    assert decided(attempts, 64, 1600) == (1600 // LONGEST_REST, 0)
    assert decided(attempts, 64, 10, most_value=4.0) == (10, 640)
    assert decided(attempts, 2, 10) == (10, 20)


def test_sequences_that_begin_end_no_pause_for_what_was_spent() -> None:
    learned = Learned()
    learned.times.terms, learned.times.trials = TERMS, TRIAL_STEPS
    attempts = Attempts(learned)
    attempts.observe_look_up(64 * 1e-5, 64)
    attempts.balance = -1.0
    number, looked_up = decided(attempts, 64, 200)
    assert (number, looked_up) == (1, 0), "one step's time is earned in 250 steps"
    attempts.rests["a"] = attempts.number + 9, 16
    attempts.pause_until_due(["a"])
    assert attempts.skip_step() and not attempts.skip_step(has_begun=True), "a new sequence has not rested"


def test_reading_texts_leaves_time_for_look_ups() -> None:
    """Once the balance was used up, reading responses took what it earned, and nothing was looked up again."""
    learned = Learned()
    learned.times.terms, learned.times.trials = TERMS, TRIAL_STEPS
    attempts, allowed, read = Attempts(learned), 0, 0
    attempts.balance = attempts.reading = -0.5
    for _ in range(200):
        allowed += attempts.begin_step(4, 100) > 0
        if attempts.may_read:
            read += 1
            attempts.pay_reading(1e-4, 4, 100)
    assert allowed > 70 and 5 < read < 50


def test_an_unknown_rate_is_better_than_its_mean_while_trials_are_paid() -> None:
    learned = Learned()
    learned.times.terms, learned.times.trials = np.array([3e-3, 0, 0, 1e-4, 9e-4, 0, 0]), TRIAL_STEPS
    attempts, draft = Attempts(learned), Draft([1], [0.25], 2)
    assert attempts.choose(table(draft), 1, 0) == [1], "a third of a step is more than a quarter, but less than that and a deviation"
    attempts.balance = -0.1
    assert attempts.choose(table(draft), 1, 0) == [0]
    attempts.balance = 1.0
    for _ in range(400):
        learned.acceptance.observe(table(*[draft] * 4).cells, [1] * 4, [1, 0, 0, 0])
    assert attempts.choose(table(draft), 1, 0) == [0], "it is known by now"
    mean, better = (learned.acceptance.survival(table(draft), deviations)[0, 0] for deviations in (0.0, 1.0))
    assert mean == pytest.approx(0.25) and better == pytest.approx(mean + np.sqrt(mean * (1 - mean) / 1605))


def test_what_was_refused_long_ago_is_tried_again() -> None:
    learned = Learned()
    draft = Draft([1], [0.6], 2)
    for _ in range(100):
        learned.acceptance.observe(table(draft).cells, [1], [0])
    assert learned.acceptance.survival(table(draft))[0, 0] < 0.05
    attempts = Attempts(learned)
    for _ in range(6 * HALF_LIFE):
        attempts.begin_step(1, 0)
    assert learned.acceptance.survival(table(draft))[0, 0] > 0.4


def test_a_slower_machine_does_not_change_the_relative_cost_of_drafts() -> None:
    """Drafted steps of the quick time would make drafts look free beside plain steps of the slow time."""
    rng, times = np.random.default_rng(3), StepTimes()
    for k in range(600):
        drafted = 8 * (k % 2)
        times.observe(1, 100, drafted, 0.003 * (1 + 0.4 * (drafted > 0)) * rng.normal(1, 0.05))
    for k in range(600):
        drafted = 8 * (k % 100 == 0)
        times.observe(1, 100, drafted, 0.012 * (1 + 0.4 * (drafted > 0)) * rng.normal(1, 0.05))
    times.fit()
    step_s = times.step_s(1, 100)
    assert step_s == pytest.approx(0.012, rel=0.05)
    assert (times.path_s + float(times.verify_s(1, np.array(8)))) / step_s == pytest.approx(0.4, rel=0.25)


def test_sequences_whose_drafts_fail_rest_longer_and_longer() -> None:
    attempts = Attempts(Learned())
    attempts.number = 10
    for _ in range(10):
        attempts.note(["a"], [])
    assert attempts.rests["a"] == (10 + LONGEST_REST, LONGEST_REST)
    attempts.note(["b"], [])
    assert attempts.due(["a", "b", "c"], 3) == [2]
    attempts.number = 11
    assert attempts.due(["a", "b", "c"], 1) == [2], "those that did best come first"
    attempts.note(["a"], ["a"])
    assert attempts.due(["a", "b", "c"], 3) == [0, 1, 2]
    attempts.forget_all_but(["b"])
    assert set(attempts.rests) == {"b"}
