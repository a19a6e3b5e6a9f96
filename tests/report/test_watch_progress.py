from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from rlhfless_ray.report.progress_display import ProgressDisplay
from rlhfless_ray.report.progress_panel import ProgressState, line, panel, sparkline
from rlhfless_ray.report.read_run import RunRecord

ROW = {
    "step": 12, "reward/mean": 0.4312, "length/mean": 84.2, "length/p99": 213.0, "pool/rollout_actors": 2, "step_s": 0.611,
    "cost/busy_slot_s": 1.2, "cost/full_slot_s": 1.5, "cost/idle_share": 0.18, "tokens/per_s": 12345.0, "time_left_s": 62.0,
}  # fmt: skip


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_plain_prints_one_line_per_step_with_what_matters() -> None:
    out = io.StringIO()
    with ProgressDisplay("plain", 100, stream=out) as progress:
        progress.phase("rollout")
        progress.step({"step": 0, "eval/accuracy_sampled": 0.371, "eval/accuracy_greedy": 0.5})
        progress.step(ROW)
        progress.message("[note] with brackets")
    assert out.getvalue().splitlines() == [
        "step   0/100  eval 37.1% sampled, 50.0% greedy",
        "step  12/100  reward 0.431  length 84.2 (p99 213)  pool 2  0.61 s  busy 1.2 of 1.5 slot-s, idle 18%  12.3 k tok/s"
        "  1 min 02 s left",
        "[note] with brackets",
    ]


def test_held_out_rewards_that_are_no_shares_are_numbers() -> None:
    assert line({"step": 0, "eval/accuracy_sampled": -3.1, "eval/accuracy_greedy": 0.5}, 9) == "step 0/9  eval -3.1 sampled, 0.5 greedy"


def test_plain_tells_what_was_planned_what_came_and_why_the_pool_changed() -> None:
    out = io.StringIO()
    plan = {"plan/rollout_s": 0.5, "phase/rollout_s": 0.55}
    with ProgressDisplay("plain", 100, stream=out) as progress:
        progress.step(ROW | plan | {"pool/decision": "Hold", "pool/reason": "staying is as good"})
        progress.step(ROW | plan | {"pool/decision": "Grow", "pool/reason": "saves 0.2 s a step"})
        progress.step(ROW | {"plan/failed": True, "pool/decision": "Hold", "pool/reason": "the planner failed; no plan before it"})
    steady, grown, why, _, failed = out.getvalue().splitlines()
    assert "pool 2  rollout 0.55 s (0.50 s planned)  0.61 s" in steady and steady == grown
    assert why == "step 12: Grow: saves 0.2 s a step" and "the planner failed; no plan before it" in failed


def test_troubles_are_on_the_line_of_their_step() -> None:
    text = line(ROW | {"reward/failed": 3, "learn/skipped": 1, "faults/replaced": 0}, 100)
    assert "failed rewards: 3" in text and "skipped updates: 1" in text and "replaced" not in text


@pytest.mark.parametrize("value", [None, float("nan"), "text"])
def test_a_row_with_missing_or_odd_values_is_shown(value: object) -> None:
    rendered(ProgressState("r", 100, row=dict.fromkeys(ROW, value)))
    assert line(dict.fromkeys(ROW, value), 100).startswith("step")


def test_off_prints_messages_only() -> None:
    out = io.StringIO()
    with ProgressDisplay("off", 10, stream=out) as progress:
        progress.step(ROW)
        progress.message("hello")
    assert out.getvalue() == "hello\n"


def test_auto_is_live_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("CI", raising=False)
    with ProgressDisplay("auto", 10, stream=Terminal()) as progress:
        assert progress.mode == "live"
    assert ProgressDisplay("auto", 10, stream=io.StringIO()).mode == "plain"
    monkeypatch.setenv("TERM", "dumb")
    assert ProgressDisplay("auto", 10, stream=Terminal()).mode == "plain"


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = ProgressDisplay("plain", 10, stream=Closed())
    progress.step(ROW)
    progress.step(ROW)
    assert progress.mode == "off"


def test_a_terminal_that_goes_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    progress = ProgressDisplay("live", 10, stream=out)

    def gone(text: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(out, "write", gone)
    progress.message("hello")
    progress.close()
    assert progress.mode == "off"


def test_a_terminal_that_cannot_show_a_character_gets_a_replacement() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ProgressDisplay("plain", 10, stream=stream).message("größer → ok")
    assert raw.getvalue() == b"gr??er ? ok\n"


def test_live_ends_with_the_last_state_and_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    progress = ProgressDisplay("live", 100, title="a run", stream=out)
    progress.step({"step": 10, "eval/accuracy_sampled": 0.5})
    progress.step(ROW)
    progress.phase("learn")
    progress.message("this line stays")
    progress.close()
    progress.close()
    text = out.getvalue()
    assert "this line stays" in text and "step 12/100" in text and "50.0% sampled" in text and "learn" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0  # shown again after it was hidden


def rendered(state: ProgressState, width: int = 90) -> str:
    from rich.console import Console

    console = Console(width=width, file=io.StringIO(), legacy_windows=False)
    console.print(panel(state, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_panel_shows_the_step_the_trend_the_pool_and_the_costs(finished_run: Path) -> None:
    state = ProgressState("the name", 24, phase="rollout")
    for row in RunRecord.read(finished_run).steps:
        state.row, state.row_at_s = row, time.monotonic()
        state.rewards.append(row["reward/mean"])
    text = rendered(state)
    assert all(piece in text for piece in ("the name", "step 24/24", "█", "rollout", "busy", "full", "idle", "p99", "tokens/s"))
    assert max(len(row) for row in text.splitlines()) <= 90
    assert max(len(row) for row in rendered(state, 50).splitlines()) <= 50


def test_sparkline_spans_its_range_and_averages_what_does_not_fit() -> None:
    assert sparkline([0, 1], 10) == "▁█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([2, 2, 2], 10) == "▄▄▄"
    assert sparkline([], 10) == "" and len(sparkline(list(range(1000)), 37)) == 37


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_step_costs_the_driver_less_than_a_millisecond(mode: str, finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    rows = RunRecord.read(finished_run).steps
    with ProgressDisplay(mode, len(rows), stream=Terminal()) as progress:  # type: ignore[arg-type]
        times = []
        for row in rows * 20:
            begin = time.perf_counter()
            progress.phase("rollout")
            progress.step(row)
            times.append(time.perf_counter() - begin)
    assert sorted(times)[len(times) // 10] < 1e-3  # not the median: half of them may be slow on a busy machine
