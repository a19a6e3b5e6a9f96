"""Parts of the measurement of a GPU that wait for their turn end with the process that started them."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu


def test_a_waiting_part_measures_only_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Part:
        def __init__(self, *_: Any) -> None:
            pass

        def engine(self) -> Iterator[dict[str, Any]]:
            yield {}
            yield {"start_s": 1.0}

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(gpu, "GpuPart", Part)
    monkeypatch.setattr(gpu.os, "_exit", leave)
    for told, printed in (("", ""), (gpu.GO, '{"start_s": 1.0}\n')):
        monkeypatch.setattr(gpu.sys, "stdin", io.StringIO(told))
        with pytest.raises(SystemExit, match="0"):
            gpu.run_part("engine", "toy", "folder", "cpu")
        assert capsys.readouterr().out == printed


def test_no_part_is_left_waiting_after_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[subprocess.Popen[str]] = []

    def start(part: gpu.WaitingPart) -> None:
        part.process = subprocess.Popen(["sleep", "60"], text=True)
        started.append(part.process)

    def fail(part: gpu.WaitingPart) -> None:
        part.process.kill()
        raise KeyError("ours")

    monkeypatch.setattr(gpu.WaitingPart, "start", start)
    monkeypatch.setattr(gpu.WaitingPart, "result", fail)
    with pytest.raises(KeyError):
        next(gpu.measure(gpu.SMALL, ("engine", "bare"), tmp_path, "cpu", print))
    assert len(started) == 2 and all(process.wait(5) for process in started)
