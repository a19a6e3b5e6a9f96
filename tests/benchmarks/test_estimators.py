"""Parts of the estimator benchmark that need neither library."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.common.peak_rss import added_peak_bytes
from benchmarks.estimators import gsm8k_lengths, padding, padding_share
from benchmarks.learning.estimator_speed import LOOP_SAMPLES, Inputs, timings
from benchmarks.learning.logprob_memory import Heads, logprob_peaks, naive
from rlhfless_ray.learn.logprobs import chunked_logprobs


def test_peak_memory_is_what_the_work_held() -> None:
    size = 40_000_000
    held = added_peak_bytes(lambda: np.ones(size, np.uint8).sum())
    twice = added_peak_bytes(lambda: [np.ones(size, np.uint8), np.ones(size, np.uint8)])
    assert 0.9 * size < held < 1.5 * size
    assert 1.8 * size < twice < 2.5 * size


def test_lengths_have_the_published_middle() -> None:
    lengths = gsm8k_lengths(20_000, seed=0)
    assert np.median(lengths) == pytest.approx(290 + 102, rel=0.05)
    assert lengths.max() <= 1024 + 102 * np.exp(0.3 * 5)


def test_padding_share_by_hand() -> None:
    assert padding_share(np.array([2, 4, 3]), [[np.array([0, 1])], [np.array([2])]]) == pytest.approx(2 / 11)
    assert padding_share(np.array([], np.int64), [[], []]) == 0


def test_padding_shares_are_shares() -> None:
    found = padding(64, 4096, 4)
    assert 0 < found.best_cut < found.by_length < 1


@pytest.mark.slow
def test_every_timing_runs() -> None:
    rows = timings(Inputs(LOOP_SAMPLES, 8), None, None, repeats=1)
    assert len({row.what for row in rows}) == len(rows) == 10
    assert all(row.ours_ms.median > 0 and row.verl_ms is None for row in rows)


@pytest.mark.slow
def test_the_naive_form_is_ours_in_value() -> None:
    heads = Heads(tokens=8, width=4, vocabulary=50)
    head = torch.nn.Linear(heads.width, heads.vocabulary, bias=False)
    hidden, targets = torch.randn(8, 4), torch.randint(50, (8,))
    for a, b in zip(naive(head, hidden, targets), chunked_logprobs(head, hidden, targets, 3), strict=True):
        torch.testing.assert_close(a, b)
    forms = logprob_peaks(heads, None, repeats=1)
    assert [form.form for form in forms] == ["naive", "ours, default chunk", "ours, 1 tokens a chunk"]
