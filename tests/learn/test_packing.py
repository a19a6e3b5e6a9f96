"""Micro-batches within a token budget: whatever the lengths a partition, with the padding that brute force finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.estimators import padding_share
from rlhfless_ray.learn.packing import padded

LENGTHS = st.lists(st.integers(1, 60), max_size=40).map(lambda x: np.array(x, np.int64))


def gsm8k_lengths(samples: int, seed: int) -> np.ndarray:
    """Prompt and response, 8 responses a prompt: log-normal, the figures of `placement/catalog/data/lengths.yaml`."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(np.round(102 * np.exp(0.3 * rng.normal(size=samples // 8))), 8)
    return (prompt + np.clip(np.round(290 * np.exp(0.48 * rng.normal(size=samples))), 1, 1024)).astype(np.int64)


@given(LENGTHS, st.integers(1, 200), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_partition_budget_and_ranks(lengths: np.ndarray, budget: int, ranks: int) -> None:
    dealt = padded(lengths, budget, ranks)
    assert len(dealt) == ranks and len({len(mine) for mine in dealt}) == 1
    parts = [part for mine in dealt for part in mine]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts or [np.empty(0, np.int64)])), np.arange(len(lengths)))
    for part in parts:
        assert len(part) <= 1 or int(lengths[part].max(initial=0)) * len(part) <= budget
        assert part.dtype == np.int64 and (np.diff(part) > 0).all()


def cuts(n: int) -> list[list[int]]:
    """Every way to cut n things in a row: sizes of the pieces."""
    return [[]] if n == 0 else [[k, *rest] for k in range(1, n + 1) for rest in cuts(n - k)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(10, 90), st.sampled_from([0, 5, 40]))
@settings(max_examples=80, deadline=None)
def test_padded_is_the_best_of_all_cuts(lengths: list[int], budget: int, overhead: int) -> None:
    order = sorted(lengths, reverse=True)
    best = np.inf
    for sizes in cuts(len(order)):
        cost, at = 0, 0
        for k in sizes:
            cost += order[at] * k + overhead if k == 1 or order[at] * k <= budget else 10**9
            at += k
        best = min(best, cost)
    array = np.array(lengths)
    parts = padded(array, budget, 1, overhead)[0]
    assert sum(int(array[part].max()) * len(part) + overhead for part in parts) == best


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("budget", [4096, 8192, 16384])
@pytest.mark.parametrize("samples", [64, 256, 1024])
def test_gsm8k_has_little_padding(samples: int, budget: int, ranks: int) -> None:
    lengths = gsm8k_lengths(samples, seed=samples)
    assert padding_share(lengths, padded(lengths, budget, ranks)) < 0.05
