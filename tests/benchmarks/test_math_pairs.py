"""The command that measures the `math` reward on a public table of pairs reads such a table, and keeps the pairs that differ."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.math_pairs import main, only_answer

TABLE = """
import pytest

@pytest.mark.parametrize("gold,pred,expected", [
    ("$9$", "\\\\boxed{3^2}", 1),
    ("7", "8", 0),
    (r"\\frac{1}{3}", "0.33", 1),
    ("$1$ and $2$", "1, 2", 1),
    ("5", "5.0", True, 1),
])
def test(gold, pred, expected): ...
"""


def test_pairs_are_read_from_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some_package-1.0" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TABLE)
    with tarfile.open(tmp_path / "some_package-1.0.tar.gz", "w:gz") as archive:
        archive.add(folder.parent, "some_package-1.0")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["math_pairs", str(tmp_path / "some_package-1.0.tar.gz"), "--quick"])
    main()
    found = json.loads((tmp_path / "quick" / "math_pairs.json").read_text())
    assert (found["rows"], found["pairs"], found["agree"]) == (4, 3, 2)
    assert [(pair["answer"], pair["theirs"], pair["ours"]) for pair in found["differing"]] == [("0.33", "equal", "different")]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{4} it is", "4"),
        ("\\[ 4 \\]", "4"),
        ("4 apples", "4 apples"),
        ("first $3$, then $4$", None),
        ("\\boxed{1}\\boxed{2}", None),
    ],
)
def test_a_side_names_one_answer_or_is_left_out(text: str, answer: str | None) -> None:
    assert only_answer(text) == answer
