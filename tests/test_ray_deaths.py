"""Ray's own processes and the driver die, or stand still: the run's last words, its end, and that it goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.common.ray_deaths import KILLED, STOPPED, resume, strike

pytestmark = [pytest.mark.ray, pytest.mark.engine]


def members(names: tuple[str, ...], *everyday: str) -> list[object]:
    return [name if name in everyday else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("what", members(KILLED, "raylet", "driver"))
def test_a_death_is_told_within_20_s_and_the_run_goes_on(tmp_path: Path, what: str) -> None:
    struck = strike(tmp_path, what)
    assert struck.wrong_after_kill(what) == [], struck
    assert resume(tmp_path) == 0, (tmp_path / "resumed.stderr").read_text()


@pytest.mark.parametrize("what", members(STOPPED, "driver"))
def test_a_process_that_stands_still_is_named_and_the_run_goes_on(tmp_path: Path, what: str) -> None:
    struck = strike(tmp_path, what, signal.SIGSTOP)
    assert struck.wrong_after_stop() == [], struck
