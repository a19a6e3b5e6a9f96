"""Parts of a start from marks made by hand, and the shares of imports from what Python prints."""

from __future__ import annotations

import pytest

from benchmarks.coldstart import Mark, StartPart, import_shares, parts, spreads, targets_of
from benchmarks.common.results import Spread


def test_parts_lie_between_marks() -> None:
    marks = [Mark("asked", 10.0, 1.0), Mark("import", 14.0, 3.5, 400.0), Mark("build engine", 14.5, 4.0, 700.0)]
    assert parts(marks) == [StartPart("import", 4.0, 2.5, 400.0), StartPart("build engine", 0.5, 0.5, 700.0)]
    assert parts(marks[:1]) == []


def test_the_total_is_of_each_round() -> None:
    """The median of sums, not the sum of medians."""
    rounds = [[StartPart("a", wall, wall / 2, 1.0), StartPart("b", 4.0 - wall, 1.0, 2.0)] for wall in (1.0, 2.0, 3.0)]
    rounds[0][1] = StartPart("b", 30.0, 1.0, 5.0)
    found = spreads(rounds)
    assert list(found) == ["a", "b", "total"]
    assert found["a"]["wall_s"].median == 2.0 and found["b"]["wall_s"].median == 2.0
    assert found["total"]["wall_s"] == Spread.of([31.0, 4.0, 4.0])
    assert found["total"]["cpu_s"].median == 2.0 and found["total"]["memory_mb"] == Spread.of([5.0, 2.0, 2.0])


def test_rounds_must_have_the_same_parts() -> None:
    with pytest.raises(ValueError, match="shorter"):
        spreads([[StartPart("a", 1.0, 1.0, 0.0), StartPart("b", 1.0, 1.0, 0.0)], [StartPart("a", 1.0, 1.0, 0.0)]])


TOLD = """\
import time: self [us] | cumulative | imported package
import time:       300 |        300 |     torch._C
import time:       100 |        400 |   torch
Triton is installed | but it has no backend
import time:       595 |        595 |   vllm.config
import time:         5 |          5 |   tiny
"""


def test_imports_by_package() -> None:
    assert import_shares(TOLD.splitlines()) == {"vllm": 0.595, "torch": 0.4}
    assert import_shares(TOLD.splitlines(), least=0.0) == {"vllm": 0.595, "torch": 0.4, "tiny": 0.005}


def test_targets_tell_what_the_engine_added_from_what_imports_hold() -> None:
    wall = {name: {"total": {"wall_s": Spread.of([seconds])}} for name, seconds in (("cold", 8.0), ("parked", 0.2))}
    memory = {name: Spread.of([mb]) for name, mb in (("prewarmed", 400.0), ("working", 800.0), ("parked", 500.0))}
    targets = targets_of({"starts": wall, "memory_mb": memory})
    assert [(target.value, target.met) for target in targets] == [(8.0, False), (0.2, True), (0.375, False), (0.75, True)]
