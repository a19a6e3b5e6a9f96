"""A test without a tier's marker may start nothing heavy: tests/conftest.py fails it, and says which marker it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment

pytestmark = pytest.mark.slow  # each starts a pytest of its own

PURE = '''
import contextlib
import subprocess
import sys
import time
import types

import pytest

import tests.conftest

tests.conftest.PURE_CPU_S = 0.2
distributed = sys.modules.setdefault("torch.distributed", types.ModuleType("torch.distributed"))
distributed.init_process_group = lambda *_: None


def burn():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass


@pytest.fixture(scope="module")
def costly():
    burn()


def test_cluster():
    with contextlib.suppress(Exception):
        subprocess.Popen(["/opt/ray/gcs_server", "--log_dir=/nowhere"])


def test_engine():
    with contextlib.suppress(Exception):
        import vllm


def test_gang():
    with contextlib.suppress(Exception):
        distributed.init_process_group("gloo")


def test_work():
    burn()


def test_fixture(costly):
    pass


def test_cheap(costly):
    subprocess.run(["true"], check=True)


@pytest.mark.learner
def test_marked():
    distributed.init_process_group("gloo")


def test_by_fixture(cases):
    distributed.init_process_group("gloo")


@pytest.fixture
def cases():
    burn()
'''  # fmt: skip


def outcomes(folder: Path, *arguments: str) -> tuple[dict[str, str], str]:
    """Outcome by test ("PASSED", "FAILED", "ERROR" where the set-up fails), and everything that pytest said."""
    (folder / "test_it.py").write_text(PURE)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null"]
    ended = subprocess.run(
        [*command, *arguments, str(folder / "test_it.py")], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    rows = [line.split(" - ")[0].split() for line in ended.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR"))]
    return {name.rpartition("::")[2]: outcome for outcome, name in rows}, ended.stdout + ended.stderr


def test_a_pure_test_that_starts_something_heavy_fails_and_names_its_marker(tmp_path: Path) -> None:
    found, said = outcomes(tmp_path, "-m", "pure")
    assert found == {
        "test_cluster": "FAILED",
        "test_engine": "FAILED",
        "test_gang": "FAILED",
        "test_work": "FAILED",
        "test_fixture": "ERROR",
        "test_cheap": "PASSED",
    }
    for words in (
        "it starts a Ray cluster: mark it `@pytest.mark.ray`",
        "it imports vllm: mark it `@pytest.mark.engine`",
        "it starts a torch.distributed process group: mark it `@pytest.mark.learner`",
        "make it cheaper or mark it `@pytest.mark.slow`",
    ):
        assert words in said


@pytest.mark.parametrize("selected", ["learner", "ray or engine or slow or gpu"])
def test_markers_select_and_fixtures_mark(tmp_path: Path, selected: str) -> None:
    found, _ = outcomes(tmp_path, "-m", selected)
    assert found == ({"test_marked": "PASSED", "test_by_fixture": "PASSED"} if selected == "learner" else {})
