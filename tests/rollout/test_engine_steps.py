"""Step records that an engine sends as a table."""

from __future__ import annotations

import pickle

import pytest

from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import EngineStep

FIRST = [EngineStep(4, 90, 300, 0.5), EngineStep(3, 3, 12, 0.25, 8, 5, 0.01, (6, 4), 0.2)]
REST = [EngineStep(2, 2, k, 0.125 * k, work_s=0.1) for k in range(1, 40)]


def test_records_are_the_same_after_they_were_sent_and_collected() -> None:
    collected = EngineSteps()
    for part in (FIRST, [], REST):
        collected.extend(pickle.loads(pickle.dumps(EngineSteps(part))))
    assert list(collected) == FIRST + REST and len(collected) == 41
    assert collected.newest(2) == REST[-2:] and collected.newest(99) == FIRST + REST and collected.newest(0) == []


def test_columns_are_those_of_the_records() -> None:
    steps = EngineSteps(FIRST + REST)
    for name in ("running", "new_tokens", "context_tokens", "seconds", "drafted", "accepted", "draft_s", "work_s"):
        assert steps.column(name).tolist() == [getattr(step, name) for step in FIRST + REST], name
    assert (steps.column("model_drafted").sum(), steps.column("model_accepted").sum()) == (6, 4)
    assert steps.token_s().tolist() == pytest.approx([step.token_s for step in FIRST + REST])
