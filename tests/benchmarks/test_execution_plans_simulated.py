"""The table of docs/execution-plans.md: plans are never behind taking turns, and the page has one place for it."""

from __future__ import annotations

import pytest

from benchmarks.execution_plans_simulated import PAGE, WIDTHS, PaperSetting, PlanRow, filled
from placement.catalog import catalog
from placement.execution_plan import plan_step
from placement.planning.objective import Objective

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("policy", "same"), [("llama-2-13b", True), ("llama-2-70b", False)])
def test_a_plan_is_never_behind_turns_and_gains_where_efficiency_falls(policy: str, same: bool) -> None:
    phases = catalog.values(catalog.read("phases"))
    gains = []
    for half in (0.0, 4000.0):
        setting = PaperSetting(policy, same, 2048, {**phases, "half_efficiency_tokens": half})
        best, _ = plan_step(setting.problem(), Objective(prefer=1.0))
        turns_s = setting.in_turn_s(WIDTHS)
        assert best.seconds <= turns_s * (1 + 1e-9) <= min(setting.in_turn_s([width]) for width in WIDTHS) * (1 + 2e-9)
        gains.append(turns_s / best.seconds)
    assert gains[1] >= gains[0] and gains[1] > 1.01


def test_the_page_has_a_place_for_the_table() -> None:
    row = PlanRow("a", "b", 16, 2048, 3.0, 2.0, 1.5, None, "")
    both = [row, PlanRow("a", "b", 16, 8192, 2.0, 2.0, 2.0, None, "")]
    page = filled(PAGE.read_text(), both)
    assert "| a | b | 16 | 2048 | 3.0 s | 2.0 s | 1.5 s | 2.00× |" in page and "| mean |  |  | 8192 |  |  |  | 1.00× |" in page
    with pytest.raises(ValueError, match="one place for"):
        filled("no table", both)
