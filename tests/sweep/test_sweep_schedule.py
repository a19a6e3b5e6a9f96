"""Which runs start and end when, what a resumed sweep keeps, and the table and report over all runs. No run is started here."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.sweep.halving import Halving
from rlhfless_ray.sweep.run_sweep import RunningRun, SweepRunner, _end_leftover, next_runs
from rlhfless_ray.sweep.sweep_file import EarlyStopping, PlannedRun, Sweep
from rlhfless_ray.sweep.sweep_folder import GrowingMetrics, RunState, SweepFolder, best_first
from rlhfless_ray.sweep.sweep_report import write_sweep_report
from rlhfless_ray.sweep.sweep_table import SweepDisplay, sweep_table
from tests.sweep.test_sweep_file import sweep_of


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return sweep_of(tmp_path, root=str(tmp_path / "out"), grid={"learner.learning_rate": [0.1, 0.2, 0.3], "run.seed": [0, 1]})


def names(runs: list[PlannedRun]) -> list[str]:
    return [run.name.replace("learning_rate-0.", "") for run in runs]


def test_runs_start_in_order_at_most_so_many_at_once_and_one_makes_the_policy_for_all(sweep: Sweep) -> None:
    runs = list(sweep.runs)
    nothing = {run.policy_key: False for run in runs}
    everything = dict.fromkeys(nothing, True)
    assert names(next_runs(runs, [], 4, everything)) == ["1_seed-0", "1_seed-1", "2_seed-0", "2_seed-1"]
    assert names(next_runs(runs, [], 4, nothing)) == ["1_seed-0", "1_seed-1"]  # the others wait for the policies of their seeds
    assert names(next_runs(runs[1:], runs[:1], 4, nothing)) == ["1_seed-1"]
    assert names(next_runs(runs[1:], runs[:1], 2, {**everything, runs[1].policy_key: False})) == ["1_seed-1"]
    assert next_runs(runs[2:], runs[:2], 2, everything) == []


def made(sweep: Sweep) -> SweepFolder:
    folder = SweepFolder.new(sweep)
    folder.create()
    return folder


def halved(direction: str, keep: float = 0.5) -> Halving:
    return Halving(EarlyStopping(first_step=2, keep=keep), "reward/mean", direction, "abcd", most_steps=16)


def test_a_run_ends_where_it_is_not_in_the_best_share_of_those_before_it() -> None:
    halving = halved("max")
    at = {step: {name: halving.ends(name, {"step": step, "reward/mean": value}) for name, value in values.items()} for step, values in {
        1: {"a": 0.0, "b": 9.0},  # before the first comparison
        2: {"a": 1.0, "b": 2.0, "c": 1.2, "d": 3.0},  # medians before c and d: 1.5 and 1.2
        4: {"b": 5.0, "d": 4.0},
    }.items()}  # fmt: skip
    assert at == {1: {"a": False, "b": False}, 2: {"a": False, "b": False, "c": True, "d": False}, 4: {"b": False, "d": True}}
    assert not halving.ends("c", {"step": 2, "reward/mean": 1.2})  # the same row decides nothing again
    assert not halving.ends("b", {"step": 16, "reward/mean": 0.0}) and not halving.ends("b", {"step": 17})


def test_less_is_better_where_the_direction_says_so() -> None:
    halving = halved("min")
    ends = [halving.ends(name, {"step": 2, "reward/mean": value}) for name, value in {"a": 1.0, "b": 2.0, "c": 0.5}.items()]
    assert ends == [False, True, False]


def test_a_resumed_sweep_keeps_finished_runs_only_and_only_with_their_settings(sweep: Sweep, tmp_path: Path) -> None:
    folder = made(sweep)
    for state, found in zip(folder.states, ("done", "ended early", "failed", "stopped", "running", "waiting"), strict=True):
        state.state, state.step = found, 3  # type: ignore[assignment]
    for run in sweep.runs:
        folder.recipe_file(run.name).write_text(run.recipe.to_yaml())
    folder.write(sweep, "stopped")
    again = SweepFolder.resumed(sweep)
    assert again.path == folder.path
    assert [(state.state, state.step) for state in again.states] == [("done", 3), ("ended early", 3), *[("waiting", 0)] * 4]
    assert made(sweep).path.name == "rates-2"  # without --resume nothing is overwritten
    (folder.path.with_name("rates-2") / "sweep.json").write_text('{"name": "rates-2", "runs": []}')  # a sweep of its own
    assert SweepFolder.resumed(sweep).path == folder.path
    for other in ({"runs": [{"set": {"rollout.temperature": 0.5}}]}, {"set": {"rollout.temperature": 0.5}}):
        changed = sweep_of(tmp_path, root=str(tmp_path / "out"), grid=sweep.file.grid, **other)
        with pytest.raises(UserError, match=r"has finished with other settings \(rollout.temperature\)"):
            SweepFolder.resumed(changed)
    harmless = sweep_of(tmp_path, root=str(tmp_path / "out"), grid=sweep.file.grid, set={"cluster.priority": 2.0, "watch.wandb": "offline"})
    assert SweepFolder.resumed(harmless).states[0].state == "done"
    with folder.locked(), pytest.raises(UserError, match="being written by another process"), SweepFolder.resumed(sweep).locked():
        pass


def test_a_growing_metrics_file_is_read_once_and_its_last_row_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = GrowingMetrics(path)
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in range(6)]

    def steps_after(text: str) -> list[int]:
        path.write_text(text)
        return [row["step"] for row in metrics.new_rows()]

    assert metrics.new_rows() == []
    assert steps_after("".join(lines[:3])) == [0, 1, 2] and metrics.new_rows() == []
    assert steps_after("".join(lines[:4]) + lines[4][:5]) == [2, 3]  # the last line is being written
    assert steps_after("".join(lines[:5])) == [3, 4]
    last = json.dumps({"step": 4, "eval/accuracy_sampled": 1.0, "reward/mean": 0.4}) + "\n"
    assert steps_after("".join(lines[:4]) + last) == [4]  # an evaluation was added
    assert steps_after("".join(lines[:2])) == [0, 1]  # a run went on from a checkpoint
    assert steps_after("".join(lines[:3])) == [1, 2]
    assert steps_after("") == [] and steps_after(lines[0]) == [0]


def test_a_driver_that_a_killed_sweep_left_may_end_before_it_is_asked_to(tmp_path: Path) -> None:
    """Then nothing has its process id any more, and the lock is free a moment later."""
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    (tmp_path / "status.json").write_text(json.dumps({"status": "running", "host": platform.node(), "pid": ended}))
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    threading.Timer(0.2, os.close, (handle,)).start()
    _end_leftover(tmp_path)
    _end_leftover(tmp_path / "none")


def test_a_run_that_fell_behind_does_not_go_on_after_its_sweep_was_killed_or_stopped(sweep: Sweep) -> None:
    folder = made(sweep)
    for state, reason in zip(folder.states, ("it fell behind at step 6", ""), strict=False):
        state.state, state.reason = "running", reason
    for run in sweep.runs:
        folder.recipe_file(run.name).write_text(run.recipe.to_yaml())
    folder.write(sweep, "running")
    assert [state.state for state in SweepFolder.resumed(sweep).states] == ["ended early", *["waiting"] * 5]
    process, sent = SimpleNamespace(poll=lambda: None), list[int]()
    process.send_signal = sent.append
    running = RunningRun(sweep.runs[0], folder.states[0], process)  # type: ignore[arg-type]
    for asked in ("ended early", "stopped"):
        object.__new__(SweepRunner)._ask(running, asked, 2)  # type: ignore[arg-type]
    assert running.asked == "ended early" and sent == [2, 2]


def test_what_was_saved_is_a_share_of_the_run_alone() -> None:
    state = RunState("a", alone={"seconds": 100.0, "slot_s": 200.0})
    state.read(
        [{"step": 4, "time_s": 80.0, "cost/total_full_slot_s": 250.0, "reward/mean": 0.5}, {"step": 5, "time_s": 90.0}], "reward/mean"
    )
    assert (state.step, state.metric, state.seconds) == (5, 0.5, 90.0)
    assert state.saved == pytest.approx({"seconds": 0.1, "slot_s": -0.25})


def test_a_reader_that_went_away_ends_no_sweep(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        display = SweepDisplay(sweep, [])
        display.message("x" * 100_000)
        display.close()


def test_table_and_report_show_the_best_first_every_state_and_why_a_run_failed(sweep: Sweep) -> None:
    folder = made(sweep)
    for i, state in enumerate(folder.states):
        state.state, state.step, state.metric, state.seconds, state.slot_s = "done", 4, float(i % 4), 10.0, 20.0
        (folder.path / state.name).mkdir()
        rows = [{"step": step, "cost/total_full_slot_s": 5.0 * step, "eval/accuracy_sampled": 0.1 * step} for step in range(1, 5)]
        (folder.path / state.name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.states[1].state, folder.states[1].reason, folder.states[1].metric = "failed", "run failed: <no memory>", None
    folder.states[0].alone = {"slot_s": 40.0}
    folder.states[2].read([{"step": 4, "shared/lent_slot_s": 12.0, "shared/borrowed_slot_s": 7.0}], sweep.file.metric)
    assert [state.metric for state in best_first(folder.states, "max")] == [3.0, 2.0, 1.0, 0.0, 0.0, None]
    assert [state.metric for state in best_first(folder.states, "min")] == [0.0, 0.0, 1.0, 2.0, 3.0, None]
    table = sweep_table(sweep, folder.states)
    assert table.row_count == 6 and "5 of 6 runs done" in str(table.title) and table.columns[-1].header == "saved against alone"
    folder.write(sweep, "failed")
    page = write_sweep_report(folder.path).read_text()
    assert "6 runs, at most 2 at once: 5 done, 1 failed." in page
    assert "run failed: &lt;no memory&gt;" in page and "50% slot-s" in page
    assert "12 slot-s / 7 slot-s" in page and page.count("lent / borrowed") == 1
    charts = json.loads(page.partition('id="charts">')[2].partition("</script>")[0])
    assert charts["eval-accuracy_sampled-steps"]["data"][0]["x"] == [1.0, 2.0, 3.0, 4.0]
    assert charts["eval-accuracy_sampled-cost"]["data"][5]["x"] == [5.0, 10.0, 15.0, 20.0]
    assert charts["bars-slot_s"]["data"][1]["name"] == "alone"


def test_a_sweep_over_policies_and_stages_draws_the_curves_of_both(sweep: Sweep) -> None:
    folder = made(sweep)
    kinds: list[dict[str, float]] = [{"reward/mean": 0.5, "learn/loss": 0.1}, {"learn/loss": 2.0, "eval/loss": 2.1}]
    for state, row in zip(folder.states[:2], kinds, strict=True):
        (folder.path / state.name).mkdir()
        (folder.path / state.name / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in (1, 2)))
    folder.write(sweep, "done")
    charts = json.loads(write_sweep_report(folder.path).read_text().partition('id="charts">')[2].partition("</script>")[0])
    drawn = {key: [curve["name"] for curve in chart["data"]] for key, chart in charts.items() if key.endswith("-steps")}
    policy, stage = ([state.name] for state in folder.states[:2])
    assert drawn == {"reward-mean-steps": policy, "eval-loss-steps": stage, "learn-loss-steps": stage}
