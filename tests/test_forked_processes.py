"""Files that share what takes minutes to make go to one process, and whatever happens in a forked process is reported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment
from tests.forked_processes import TOGETHER, unit_of


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
    "test_told.py": """
import warnings, pytest
@pytest.fixture
def spoilt():
    yield
    raise KeyError("at the end")
def test_passes(): pass
def test_fails():
    print("what it said")
    assert 1 == 2
def test_warns(): warnings.warn("careful")
def test_skips(): pytest.skip("no reason")
def test_ends_badly(spoilt): pass
""",
    "test_ends.py": """
import os
def test_ends_the_process(): os._exit(3)
def test_never_begins(): pass
""",
}


@pytest.mark.slow
def test_failures_warnings_and_the_end_of_a_process_are_reported(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "tests.forked_processes", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "--processes", "2", str(tmp_path)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    told = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR"))]
    assert done.returncode == 1 and {(line.split()[0], line.rpartition("::")[2]) for line in told} == {
        ("PASSED", "test_passes"),
        ("FAILED", "test_fails"),
        ("PASSED", "test_warns"),
        ("PASSED", "test_ends_badly"),
        ("ERROR", "test_ends_badly"),
        ("FAILED", "test_ends_the_process"),
        ("FAILED", "test_never_begins"),
    }
    for words in ("what it said", "UserWarning: careful", "KeyError: 'at the end'", "1 skipped", "the processes of the tests ended with ["):
        assert words in done.stdout
