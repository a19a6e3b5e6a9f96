"""How many runs of a sweep the memory holds at once: those that cannot fit together are refused, and `auto` takes as many as fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.preflight.memory_needs import Room
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.sweep import run_sweep
from rlhfless_ray.sweep.run_sweep import SweepRunner
from rlhfless_ray.sweep.sweep_file import PlannedRun, Sweep, load_sweep
from rlhfless_ray.sweep.sweep_memory import check_memory, most_runs, with_part_of_memory
from tests.conftest import ROOT, command_here
from tests.placement.test_memory import QWEN_05B
from tests.sweep.test_sweep_file import sweep_of
from tests.test_memory_check import ENORMOUS, folder

GPUS = {"slots": 4, "bytes": 80_000_000_000}


def room(gigabytes: float, slots: int = 4) -> Room:
    size = int(gigabytes * 1e9)
    return Room("cpu", slots, size, size, has_driver=True)


def seeds(tmp_path: Path, model: dict[str, Any], count: int = 4, **tree: Any) -> Sweep:
    """A sweep of runs of one policy, which differ by their seeds."""
    path = folder(tmp_path / "policy", model)
    recipe = {
        "policy": {"path": str(path), "dtype": "bfloat16"},
        "prompts": {"path": "rows.jsonl", "max_prompt_tokens": 64},
        "reward": {"function": "math"},
        "rollout": {"max_tokens": 64},
        "learner": {"zero_stage": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    file = tmp_path / "seeds.yaml"
    grid = {"run.seed": list(range(count))}
    file.write_text(yaml.safe_dump({"recipe": "recipe.yaml", "root": str(tmp_path / "out"), "grid": grid, "metric": "reward/mean", **tree}))
    return load_sweep(file)


def peak_gb(run: PlannedRun) -> float:
    """The least that a run needs at once, in GB."""
    return max(need.bytes for need in RunMemory.of(run.recipe).least(Room("cpu", 1, None, has_driver=True)) if not need.alone) / 1e9


def test_runs_that_cannot_fit_together_are_refused_with_the_number_that_can(tmp_path: Path) -> None:
    runs = seeds(tmp_path, QWEN_05B).runs
    each = peak_gb(runs[0])
    assert each > 4
    for count in (1, 2, 3, 4):
        check_memory(runs, count, room(count * each + 0.01))
    check_memory(runs[:2], 4, room(2 * each + 0.01))  # no more than there are
    with pytest.raises(UserError) as error:
        check_memory(runs, 4, room(3 * each - 0.01))
    said = str(error.value)
    assert said.startswith("at_most: 4 runs at once need at least") and said.endswith("set it to 2") and "\n" not in said


def test_the_largest_runs_count_because_any_of_them_may_meet(tmp_path: Path) -> None:
    small = sweep_of(tmp_path).runs[0]  # made from scratch: its size is not known
    runs = seeds(tmp_path, QWEN_05B, 2).runs
    both = 2 * peak_gb(runs[0])
    check_memory([small, small, runs[0], runs[1]], 2, room(both + 0.01))
    with pytest.raises(UserError, match="set it to 1"):
        check_memory([small, small, runs[0], runs[1]], 2, room(both - 0.01))


def test_a_run_that_does_not_fit_alone_is_named_with_its_own_advice(tmp_path: Path) -> None:
    runs = seeds(tmp_path, QWEN_05B, 2).runs
    with pytest.raises(UserError, match=r"^run seed-0: policy.path: .* it may fit with "):
        check_memory(runs, 2, room(peak_gb(runs[0]) - 0.01))


def test_auto_takes_as_many_as_slots_runs_and_predicted_memory_allow(tmp_path: Path) -> None:
    runs = seeds(tmp_path, QWEN_05B).runs
    assert most_runs(runs, room(1000))[0] == 4 == most_runs(runs, room(1000, slots=8))[0]
    assert most_runs(runs, room(1000, slots=3)) == (3, "as many as there are slots")
    assert most_runs(runs, room(1))[0] == 1  # one starts in any case, and checks its own memory
    fitting = [most_runs(runs, room(size))[0] for size in range(8, 120, 14)]
    assert fitting == sorted(fitting) and set(fitting) == {1, 2, 3, 4}
    size = 8 + 14 * fitting.index(2)
    assert 0.85 * size > 2 * peak_gb(runs[0])  # the prediction is above the lower bound
    assert most_runs(runs, room(size))[1].startswith("3 would take about ")


def test_small_runs_and_supervised_stages_take_the_memory_of_their_processes(tmp_path: Path) -> None:
    for sweep in (sweep_of(tmp_path, grid={"run.seed": [0, 1, 2, 3]}), sweep_of(tmp_path, recipe=str(ROOT / "recipes" / "sft.yaml"))):
        runs = sweep.runs * (4 // len(sweep.runs))
        check_memory(runs, 4, room(1))
        assert most_runs(runs, room(64))[0] == 4 and most_runs(runs, room(3.9))[0] < 4


def test_beside_gpus_runs_share_the_memory_of_the_host(tmp_path: Path) -> None:
    runs = seeds(tmp_path, QWEN_05B).runs
    check_memory(runs, 4, Room("gpu", **GPUS, host_bytes=1))  # functions take turns on devices, and hosts may swap
    assert most_runs(runs, Room("gpu", **GPUS, host_bytes=64_000_000_000))[0] == 4
    assert most_runs(runs, Room("gpu", **GPUS, host_bytes=10_000_000_000))[0] < 4
    assert most_runs(runs, Room("gpu", **GPUS)) == (4, "as many as there are runs; the memory is not known here")


def test_the_command_refuses_what_cannot_fit_before_it_makes_a_folder(tmp_path: Path) -> None:
    seeds(tmp_path, ENORMOUS, 2)
    refused = command_here("sweep", str(tmp_path / "seeds.yaml"))
    assert refused.returncode == 2 and refused.stderr.startswith("error: run seed-0: policy.path: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", [False, True])
def test_a_run_that_needs_more_slots_than_there_are_is_refused_by_name(stage: bool, tmp_path: Path) -> None:
    """Otherwise its sweep would start, and end with it as a failed run."""
    tree: dict[str, Any] = {"grid": {"learner.ranks": [1, 4]}, "cluster": {"cpus": 3}, "root": str(tmp_path / "out")}
    sweep = sweep_of(tmp_path, **tree, **({"recipe": str(ROOT / "recipes" / "sft.yaml")} if stage else {}))
    with pytest.raises(UserError, match=r"^run ranks-4: learner.ranks: 4 slots at once, but the cluster has 3 \(CPU cores\); lower it"):
        SweepRunner(sweep)
    one_step_off = {"rollout.max_lag_steps": 1, "rollout.min_actors": 3, "rollout.max_actors": 3}
    if not stage:
        with pytest.raises(UserError, match=r"^run ranks-1: rollout.max_lag_steps: the learner .* and the engines .* hold slots at once"):
            SweepRunner(sweep_of(tmp_path, **tree, set=one_step_off))


def test_each_run_chooses_its_settings_for_an_equal_part_unless_it_names_one(tmp_path: Path) -> None:
    runs = seeds(tmp_path, QWEN_05B, runs=[{"name": "a"}, {"name": "b", "set": {"cluster.memory_share": 0.75}}]).runs
    assert {run.name[0]: with_part_of_memory(run.recipe, 4).cluster.memory_share for run in runs} == {"a": 0.25, "b": 0.75}


def test_a_run_starts_with_its_part_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SweepRunner(sweep_of(tmp_path, root=str(tmp_path / "out"), at_most=2, cluster={"cpus": 3}, grid={"run.seed": [0, 1]}))
    runner.folder.create()
    runner.display = SimpleNamespace(message=lambda text: None)  # type: ignore[assignment]
    started: list[list[str]] = []
    monkeypatch.setattr(run_sweep.subprocess, "Popen", lambda words, **how: started.append(words))
    runner._start_runs()
    assert [Recipe.load(Path(words[-1])).cluster.memory_share for words in started] == [0.5, 0.5]


def test_more_runs_than_are_predicted_to_fit_start_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = seeds(tmp_path, QWEN_05B, at_most=2)
    for size, note in ((1.1, "the memory may not be enough for 2 runs at once: 2 would take about "), (100, "")):
        monkeypatch.setattr(run_sweep, "local_room", lambda recipe, size=size: room(2 * peak_gb(sweep.runs[0]) * size))
        runner = SweepRunner(sweep)
        assert runner.at_most == 2 and runner.note.startswith(note) and bool(runner.note) == bool(note)


def test_fewer_runs_than_at_most_share_the_memory_among_themselves(tmp_path: Path) -> None:
    runner = SweepRunner(sweep_of(tmp_path, root=str(tmp_path / "out"), at_most=3, cluster={"cpus": 3}, grid={"run.seed": [0, 1]}))
    assert runner.at_most == 2


def test_shares_are_those_of_as_many_runs_as_auto_starts(tmp_path: Path) -> None:
    grid = {"run.seed": [0, 1, 2]}
    sweep = sweep_of(tmp_path, root=str(tmp_path / "out"), at_most="auto", cluster={"cpus": 2}, set={"cluster.share": 0.5}, grid=grid)
    assert SweepRunner(sweep).at_most == 2
    sweep = sweep_of(tmp_path, root=str(tmp_path / "out"), at_most="auto", cluster={"cpus": 3}, set={"cluster.share": 0.5}, grid=grid)
    with pytest.raises(UserError, match="3 runs at once ask for shares"):
        SweepRunner(sweep)


def test_the_number_of_auto_is_that_of_the_runner_and_its_folder(tmp_path: Path) -> None:
    runner = SweepRunner(sweep_of(tmp_path, root=str(tmp_path / "out"), at_most="auto", cluster={"cpus": 3}, grid={"run.seed": [0, 1]}))
    assert runner.at_most == runner.sweep.file.at_most == 2 and runner.note == "runs at once: 2; as many as there are runs"
