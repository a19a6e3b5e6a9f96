"""Ray's own processes and the driver die, or stand still: the run's last words, its end, and that it goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.common.ray_deaths import KILLED, STOPPED, resume, strike

EVERYDAY = ("raylet", "driver")
pytestmark = [pytest.mark.ray, pytest.mark.engine]


@pytest.mark.parametrize("what", [pytest.param(what, marks=[] if what in EVERYDAY else pytest.mark.long) for what in KILLED])
def test_a_death_is_told_within_20_s_and_the_run_goes_on(tmp_path: Path, what: str) -> None:
    struck = strike(tmp_path, what)
    assert struck.wrong_after_kill(what) == [], struck
    assert resume(tmp_path) == 0, (tmp_path / "resumed.stderr").read_text()


@pytest.mark.long
@pytest.mark.parametrize("what", STOPPED)
def test_a_process_that_stands_still_is_named_and_the_run_goes_on(tmp_path: Path, what: str) -> None:
    struck = strike(tmp_path, what, signal.SIGSTOP)
    assert struck.wrong_after_stop() == [], struck
