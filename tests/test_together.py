"""Which files a session of pytest imports, and which of them go to one process."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, TOGETHER, pytest_collection_modifyitems, pytest_ignore_collect, unit_of


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


FILES = {
    "pure": "def test_it():\n    pass\n",
    "costly": "import pytest\npytestmark = pytest.mark.ray\n",
    "both": "import pytest\n@pytest.mark.engine\ndef test_it():\n    pass\n",
    "by fixture": "def test_it(ray_cluster):\n    pass\n",
}


@pytest.mark.parametrize(
    ("selected", "imported"),
    [
        ("", {"pure", "costly", "both", "by fixture"}),
        ("pure", {"pure", "both", "by fixture"}),
        ("not pure and not long", {"costly", "both", "by fixture"}),
        ("ray or pure", {"pure", "costly", "both", "by fixture"}),
    ],
)
def test_a_session_imports_no_file_of_which_it_selects_no_test(tmp_path: Path, selected: str, imported: set[str]) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=selected))
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert {name for name in FILES if not pytest_ignore_collect(tmp_path / f"{name}.py", config)} == imported


def test_a_costly_test_that_a_session_of_costly_tests_would_not_find_is_named(tmp_path: Path) -> None:
    """By its fixtures it starts Ray, and its file has no word of that."""
    path = tmp_path / "test_hidden.py"
    path.write_text("def test_it(fixture_of_another_file):\n    pass\n")
    marks: list[str] = []
    item: Any = SimpleNamespace(path=path, fixturenames=["fixture_of_another_file", "ray_cluster"])
    item.add_marker, item.get_closest_marker = marks.append, lambda name: name if name in marks else None
    with pytest.raises(pytest.UsageError, match=r"test_hidden.py has tests that are not pure and names neither a tier nor one of"):
        pytest_collection_modifyitems([item])
    path.write_text(path.read_text() + "# ray_cluster\n")
    pytest_collection_modifyitems([item])
