"""Drafts that shorten the end of a rollout: against brute force, and against drafts for the most tokens per second."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from placement.drafting.acceptance import choose_lengths
from placement.drafting.token_values import REFRESH_STEPS, DraftWorth, tokens_left, values_of

MOST = 6  # drafted tokens of a sequence in a step
BASE_S, ROW_S = 1.0, 0.02
Choose = Callable[[np.ndarray, np.ndarray], Sequence[int]]  # from sequences that run (n,) and their tokens so far (n,)


def seconds(lengths: np.ndarray, chance: float, choose: Choose) -> float:
    """Return the time of an engine for all its sequences, each of which gets the mean number of accepted tokens in each step."""
    got, total = np.zeros(len(lengths)), 0.0
    while len(live := np.flatnonzero(got < lengths)):
        drafted = np.asarray(choose(live, got[live]))
        got[live] += (1 - chance ** (drafted + 1)) / (1 - chance)
        total += BASE_S + ROW_S * float(len(live) + drafted.sum())
    return total


def chooser(chance: float, draws: np.ndarray | None = None) -> Choose:
    """Return the drafts that engines choose, by draws (n, S) of the lengths, or for the most tokens per second."""

    def choose(live: np.ndarray, got: np.ndarray) -> list[int]:
        n, values = len(live), None
        if draws is not None:
            values = values_of(tokens_left(draws[live], got, np.full(n, 1e9)), np.full(n, chance), BASE_S, ROW_S)
        survival = np.tile(chance ** np.arange(1, MOST + 1), (n, 1))
        return choose_lengths(survival, BASE_S + ROW_S * n, ROW_S * np.arange(1, n * MOST + 1), values=values)

    return choose


@pytest.mark.parametrize("chance", [0.5, 0.8])
@pytest.mark.parametrize("lengths", [(40, 10), (40, 38, 5), (60, 20, 20), (30, 30, 30), (200, 20, 10)])
def test_drafts_end_a_rollout_as_early_as_any_constant_ones(lengths: tuple[int, ...], chance: float) -> None:
    known = np.array(lengths, float)

    def constant(drafted: tuple[int, ...]) -> Choose:
        return lambda live, got: [drafted[i] for i in live]

    best = min(seconds(known, chance, constant(each)) for each in itertools.product(range(MOST + 1), repeat=len(lengths)))
    assert seconds(known, chance, chooser(chance, np.tile(known[:, None], (1, 4)))) <= 1.03 * best


def test_a_straggler_gets_the_drafts_that_others_can_do_without() -> None:
    rng = np.random.default_rng(0)
    gained = []
    for _ in range(3):
        lengths = np.exp(rng.normal(4.0, 0.4, 96))
        lengths[:3] *= 4
        draws = lengths[:, None] * np.exp(rng.normal(0, 0.3, (96, 1)) + rng.normal(0, 0.3, (96, 16)))  # its forecasts are off by a third
        gained.append(seconds(lengths, 0.7, chooser(0.7)) / seconds(lengths, 0.7, chooser(0.7, draws)))
    assert np.mean(gained) > 1.05


def test_without_knowledge_nothing_is_lost() -> None:
    rng = np.random.default_rng(1)
    lengths = np.exp(rng.normal(4.0, 0.8, 64))
    draws = np.array([rng.permutation(np.quantile(lengths, (np.arange(16) + 0.5) / 16)) for _ in lengths])
    assert seconds(lengths, 0.7, chooser(0.7, draws)) < 1.02 * seconds(lengths, 0.7, chooser(0.7))


def test_what_is_left_follows_what_was_generated() -> None:
    left = tokens_left(np.array([[10.0, 20.0, 40.0], [10.0, 20.0, 40.0], [1.0, 2.0, 3.0]]), np.array([0, 15, 8]), np.array([99, 99, 12]))
    assert left[0].tolist() == [10, 20, 40]
    assert left[1].tolist() == [5, 5, 25], "draws that it has outgrown repeat the others"
    assert left[2].min() >= 1
    assert left[2].max() == 12, "never more than the limit"
    assert left[2, 0] < 8 < left[2, 2], "one that has outgrown its forecast may end soon or late"


def test_values_are_kept_for_some_steps_and_equal_without_a_forecast() -> None:
    values, names = DraftWorth(), ["a", "b"]
    limits = np.array([1000, 1000])
    assert values.get(names, [1, 2], np.array([5, 5]), limits, 1.0, 0.1).tolist() == [1, 1]
    values.forecast({1: np.full(16, 500.0), 2: np.full(16, 20.0)})
    first = values.get(names, [1, 2], np.array([5, 5]), limits, 1.0, 0.1)
    assert first[0] > 2 * first[1]
    assert first.mean() == pytest.approx(1)
    assert values.get(names, [1, 2], np.array([480, 5]), limits, 1.0, 0.1).tolist() == first.tolist()
    assert values.get([*names, "c"], [1, 2, 3], np.array([5, 5, 5]), np.full(3, 1000), 1.0, 0.1)[2] == 1, "it has just begun"
    values.observe({"a": (4, 4)})
    assert values.chances["a"] > 0.6
    values.forget_all_but(["b"])
    assert "a" not in values.chances
    values.forget()
    for _ in range(REFRESH_STEPS + 1):  # of the next call, for whose responses nothing is forecast
        later = values.get(names, [1, 2], np.array([5, 5]), limits, 1.0, 0.1)
    assert later.tolist() == [1, 1]
