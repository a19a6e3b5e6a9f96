"""A soak: one driver and 64 replayed engines of 32 sequences."""

from __future__ import annotations

import pytest

from benchmarks.driver import SEQUENCES, measure

pytestmark = pytest.mark.ray

MOST_NS = 4_000  # of a processor per token: five times what a busy machine measured
MOST_BYTES = 120  # per token: three times as much. A token with its log-probability has 8.
MOST_KEPT = 0.3  # of the first rollout's tokens at `MOST_BYTES`: what a second one may add to it


def test_the_driver_of_64_engines_takes_little_for_a_token(ray_cluster: None) -> None:
    first, second = measure(64), measure(64)
    for one in (first, second):
        assert one["tokens"] > 100 * 64 * SEQUENCES and one["reports"] > 3 * 64
        assert one["ns_per_token"] < MOST_NS, one
    assert first["bytes_per_token"] < MOST_BYTES, first
    assert second["bytes_per_token"] < MOST_KEPT * MOST_BYTES, "the first rollout's responses are freed"
