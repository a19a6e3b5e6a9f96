"""The page of the planner's worth says what the results say, and early work is judged by pairs of steps."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import early_work, planning_page


def test_the_page_has_a_row_of_each_part() -> None:
    written = planning_page.PAGE.read_text().partition(planning_page.BEGIN)[2].partition(planning_page.END)[0]
    assert [row.split(" | ")[0] for row in written.strip().splitlines()[2:]] == [f"| {part.name}" for part in planning_page.PARTS]


def test_a_part_without_a_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_page, "read", lambda name: {})
    rows = planning_page.table().splitlines()[2:]
    assert len(rows) == len(planning_page.PARTS) and all(row.count(planning_page.NOT_MEASURED) == 2 for row in rows)


def test_what_a_part_saves_is_what_is_lost_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: {"same": {"speedup": speed, "saving": saving}} for name, speed, saving in (("all parts", 1.25, 0.5), ("- one", 1.0, 0.6))}
    parts = {"ablation": {planning_page.SETTING: {"rows": {"as it is": rows}}}}
    monkeypatch.setattr(planning_page, "read", lambda name: {"parts": parts})
    assert planning_page.simulated("- one") == "saves 20% of the time, adds 25% of the cost"
    assert planning_page.simulated("- another") == planning_page.NOT_MEASURED


def test_early_work_is_compared_step_by_step() -> None:
    """The steps differ by far more than what a kind saves of each."""
    lengths = np.exp(np.random.default_rng(0).normal(0, 0.5, 20))

    def rows(factor: float) -> list[list[dict[str, float]]]:
        return [[{"step_s": factor * s, "cost/full_slot_s": 2.0, "tokens/generated": 100 * s} for s in lengths]] * 2

    kinds = {"off": rows(1.0), "wake": rows(1.01), "shipped": rows(0.9)}
    early_work.check_same_tokens(kinds)
    found = early_work.compare(kinds)
    for kind, saved in (("wake", -0.01), ("shipped", 0.1)):
        assert found[kind]["step_s"]["saving"] == pytest.approx(saved)
        assert found[kind]["step_s"]["low"] == pytest.approx(saved), "as much in every step"
        assert found[kind]["cost/full_slot_s"]["saving"] == pytest.approx(0.0)
    kinds["wake"][0][0]["tokens/generated"] += 1
    with pytest.raises(ValueError, match="different tokens"):
        early_work.check_same_tokens(kinds)
