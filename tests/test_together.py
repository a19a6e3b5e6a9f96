"""Files that share what takes minutes to make go to one process of pytest."""

from __future__ import annotations

import re

from tests.conftest import ROOT, TOGETHER, unit_of


def test_files_that_read_the_learner_cases_are_one_unit_and_others_are_units_of_their_own() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    reads = {
        file
        for file in files
        if file.startswith("tests/learn/") and re.search(r"^def test\w*\(cases\b", (ROOT / file).read_text(), re.MULTILINE)
    }
    assert reads == {folder + name for folder, names in TOGETHER.items() for name in names}
    assert {unit_of(file) for file in reads} == {"tests/learn/"}
    assert all(unit_of(file) == file for file in files if file not in reads)
