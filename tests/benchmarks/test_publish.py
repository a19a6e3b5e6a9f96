"""What `benchmarks.publish` reads from a ledger."""

from __future__ import annotations

import pytest

from benchmarks.publish import times
from rlhfless_ray.functions.ledger import Row


def row(kind: str, what: str, from_s: float, to_s: float, step: int = 1) -> Row:
    return Row("lease", "node", "0", "cpu", kind, f"{kind}-1", "transfer", step, from_s, to_s, to_s - from_s, 1, 0.0, 0.0, 0, what)


def test_a_version_is_ready_when_the_engine_has_loaded_it_first() -> None:
    """The first version is no update's. A learner on two cores has two rows of one publication, and a parked engine loads again."""
    rows = [row("learn", "publish weights", 1.0, 1.5), row("rollout", "load version 0", 2.0, 2.5)]
    rows += [row("learn", "publish weights", 10.0, 10.2), row("learn", "publish weights", 10.0, 10.2)]
    rows += [row("rollout", "load version 1", 10.3, 10.7), row("rollout", "load version 1", 30.0, 30.9)]
    rows += [row("learn", "publish weights", 20.0, 20.4), row("rollout", "load version 2", 20.5, 21.1), row("learn", "work", 22.0, 29.0)]
    rows += [row("learn", "publish weights", 40.0, 49.0)]  # the last version, which no engine loads
    found = times(rows)
    assert found["versions"] == 2
    assert [found[name] for name in ("gather_s", "load_s", "ready_s")] == pytest.approx([0.3, 0.5, 0.9])
    assert times(rows[:2]) == {"versions": 0}
