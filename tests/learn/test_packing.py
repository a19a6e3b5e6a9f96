"""Micro-batches within a token budget: whatever the lengths a partition, with the padding that brute force finds, and packed
rows that a model computes as it computes the sequences alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.packing import layout, packed, padded, padding_share

LENGTHS = st.lists(st.integers(1, 60), max_size=40).map(lambda x: np.array(x, np.int64))


def gsm8k_lengths(samples: int, seed: int) -> np.ndarray:
    """Prompt and response, 8 responses a prompt: log-normal, the figures of `placement/catalog/data/lengths.yaml`."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(np.round(102 * np.exp(0.3 * rng.normal(size=samples // 8))), 8)
    return (prompt + np.clip(np.round(290 * np.exp(0.48 * rng.normal(size=samples))), 1, 1024)).astype(np.int64)


@given(LENGTHS, st.integers(1, 200), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_partition_budget_and_ranks(lengths: np.ndarray, budget: int, ranks: int) -> None:
    for form in (packed, padded):
        dealt = form(lengths, budget, ranks)
        assert len(dealt) == ranks and len({len(mine) for mine in dealt}) == 1
        parts = [part for mine in dealt for part in mine]
        np.testing.assert_array_equal(np.sort(np.concatenate(parts or [np.empty(0, np.int64)])), np.arange(len(lengths)))
        for part in parts:
            size = int(lengths[part].sum()) if form is packed else int(lengths[part].max(initial=0)) * len(part)
            assert len(part) <= 1 or size <= budget
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


def partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    rest = partitions(items[1:])
    return [[[items[0]], *p] for p in rest] + [[*p[:k], [items[0], *p[k]], *p[k + 1 :]] for p in rest for k in range(len(p))]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(30, 60))
@settings(max_examples=60, deadline=None)
def test_packed_is_near_the_fewest(lengths: list[int], budget: int) -> None:
    fewest = min(len(p) for p in partitions(lengths) if all(sum(b) <= budget for b in p))
    assert fewest <= len(packed(np.array(lengths), budget)[0]) <= 11 / 9 * fewest + 6 / 9


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("budget", [4096, 8192, 16384])
@pytest.mark.parametrize("samples", [64, 256, 1024])
def test_gsm8k_has_little_padding(samples: int, budget: int, ranks: int) -> None:
    lengths = gsm8k_lengths(samples, seed=samples)
    assert padding_share(lengths, padded(lengths, budget, ranks)) < 0.05
    loads = [sum(int(lengths[part].sum()) for part in mine) for mine in packed(lengths, budget, ranks)]
    assert max(loads) < 1.05 * lengths.sum() / ranks


def test_padding_share_by_hand() -> None:
    assert padding_share(np.array([2, 4, 3]), [[np.array([0, 1])], [np.array([2])]]) == pytest.approx(2 / 11)
    assert padding_share(np.array([], np.int64), [[], []]) == 0


def test_ten_thousand_sequences_take_no_time() -> None:
    lengths = gsm8k_lengths(10_000, 0)
    assert len(packed(lengths, 16_384)[0]) <= 1.02 * lengths.sum() / 16_384 + 1


@pytest.mark.parametrize(("lengths", "budget", "ranks"), [([0, 3], 5, 1), ([3], 0, 1), ([3], 5, 0)])
def test_what_makes_no_sense_is_refused(lengths: list[int], budget: int, ranks: int) -> None:
    for form in (packed, padded):
        with pytest.raises(ValueError, match="at least 1"):
            form(np.array(lengths), budget, ranks)


def test_layout_by_hand() -> None:
    positions, boundaries = layout(np.array([3, 1, 2]))
    np.testing.assert_array_equal(positions, [0, 1, 2, 0, 0, 1])
    np.testing.assert_array_equal(boundaries, [0, 3, 4, 6])
    assert boundaries.dtype == np.int32
    assert layout(np.zeros(0, np.int64))[1].tolist() == [0]


def test_a_packed_row_is_computed_as_its_sequences_alone(tmp_path: Path) -> None:
    import tiny_policy
    import torch
    from transformers import AutoModelForCausalLM

    for name, content in tiny_policy.tiny_policy(spread=0.3).items():
        (tmp_path / name).write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    lengths = np.array([5, 1, 9, 4])
    ids = torch.from_numpy(rng.integers(2, tiny_policy.VOCABULARY, int(lengths.sum())))
    positions, _ = layout(lengths)
    with torch.no_grad():
        row = model(input_ids=ids[None], position_ids=torch.from_numpy(positions)[None], use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths.tolist())])
        mixed = model(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-5)
    assert float((mixed - alone).abs().max()) > 0.01, "the test would not see sequences that look at each other"
