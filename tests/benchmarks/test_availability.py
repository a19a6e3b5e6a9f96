"""Availability of preemptible nodes: what is read, and what drawn traces have in common with recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.availability import SHIPPED, Availability

RECORDED = {"share_at_most": (0.41, 0.46), "share_at_0": (0.37, 0.56), "mean_share": (0.43, 0.55)}  # of three recordings


def test_drawn_traces_have_the_shares_of_recordings() -> None:
    drawn = [Availability.draw(seed, 2000).statistics() for seed in range(4)]
    for name, (low, high) in RECORDED.items():
        assert 0.85 * low < np.mean([one[name] for one in drawn]) < 1.15 * high, name
    assert 2 < np.mean([one["lost_per_hour"] for one in drawn]) < 6


def test_the_shipped_trace_is_the_one_of_its_seed() -> None:
    shipped, drawn = Availability.read(SHIPPED), Availability.draw(146, 6)
    assert (shipped.times_s, shipped.nodes, shipped.end_s) == (drawn.times_s, drawn.nodes, 21600)


def test_a_recording_with_two_rows_a_change_is_a_step_function(tmp_path: Path) -> None:
    """As Bamboo's recordings are: the old number and the new one at the same second."""
    path = tmp_path / "recorded.csv"
    path.write_text("0,0\n10,0\n10,4  # a comment\n30,4\n30,12\n40,12\n")
    trace = Availability.read(path)
    assert [trace.at(second) for second in (0, 9.9, 10, 29, 30, 39, 40, 50)] == [0, 0, 4, 4, 12, 12, 0, 4], "it begins again"
    assert trace.scaled(6).nodes == (0, 2, 6)
    assert trace.statistics()["mean_share"] == pytest.approx((20 * 4 + 10 * 12) / 40 / 12)
    path.write_text("5,1\n6,2\n")
    with pytest.raises(ValueError, match=r"recorded.csv: expected lines `seconds,nodes` from second 0 on"):
        Availability.read(path)
