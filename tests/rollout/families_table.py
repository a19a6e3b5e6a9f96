"""The table of families in docs/models.md: which ones the test covers, and how far engine and learner were apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

TOLERANCE = 1e-4  # nats, of any token in float32
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: written by tests/rollout/test_families.py -->\n", "<!-- end of families -->\n"


def table(worst: Mapping[str, float]) -> str:
    """Return {family: largest difference in nats} as Markdown."""
    rows = [f"| {family} | {difference:.0e} |" for family, difference in worst.items()]
    return "\n".join([f"| family | largest difference, nats (at most {TOLERANCE:.0e}) |", "|---|---|", *rows, ""])


def write_table(worst: Mapping[str, float]) -> None:
    """Replace the page's table."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(worst)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def read_table() -> dict[str, float]:
    """Return the page's {family: largest difference}. Raises AssertionError if it names another tolerance."""
    text = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert f"(at most {TOLERANCE:.0e})" in text
    return {family: float(distance) for family, distance in re.findall(r"^\| (\w+) \| (\S+e-\d+) \|$", text, re.M)}
