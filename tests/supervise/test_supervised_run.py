"""Whole runs of a supervised stage through the command line: what is written, and that kills and stops change nothing."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.supervise.examples import Example, Examples
from rlhfless_ray.weights.model_folder import INDEX, read_files, stored_weights
from rlhfless_ray.weights.shards import shard_name
from tests.conftest import ROOT, command_here, environment

DONE_AT_LEAST = 10  # steps before a run is disturbed


def recipe(folder: Path, name: str, **more: Any) -> Path:
    tree: dict[str, Any] = {
        "task": "sft",
        "run": {"name": name, "root": str(folder / "runs"), "seed": 3},
        "policy": {"hidden_size": 64, "layers": 2},
        "data": {"task": "chain", "rows": 480, "batch_rows": 8},
        "evaluate": {"rows": 16, "every_steps": 30},
        "learner": {"learning_rate": 1e-3, "schedule": "cosine"},
        "checkpoint": {"every_steps": 8},
        "watch": {"progress": "plain", "tensorboard": False, "wandb": "off"},
        **more,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(path: Path, *arguments: str, command: Sequence[str] = ("rlhfless_ray", "train"), forks: bool = False) -> subprocess.Popen[str]:
    """Start a run.

    Args:
        command: the module, and what comes before the recipe.
        forks: fork the driver from the tests' server, which spares its imports. Signals to the process then do not reach the driver.
    """
    run = [sys.executable, "-m", *command, str(path), *arguments]
    return subprocess.Popen(
        forked(run) if forks else run, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    return said


def wait_for_steps(run: Path, process: subprocess.Popen[str], steps: int = DONE_AT_LEAST) -> None:
    end = time.monotonic() + 240
    while len(rows(run)) < steps:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.02)


def ranks_of(driver: int) -> list[psutil.Process]:
    """The ranks of a run with a Ray of its own. They are no children of Ray's if they are forked, but write into its session's folder."""
    words = [word for child in psutil.Process(driver).children(recursive=True) for word in child.cmdline()]
    session = next(word.partition("=")[2] for word in words if word.startswith("--session_dir="))
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "RayTrainWorker" in "".join(process.cmdline()) and any(file.path.startswith(session) for file in process.open_files()):
                found.append(process)
    return found


def rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def weights(run: Path) -> dict[str, np.ndarray]:
    from rlhfless_ray.weights.tensor_file import as_numpy

    return {name: as_numpy(tensor) for name, tensor in stored_weights(read_files(run / "model"))}  # each rank has written a file


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("supervised")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """An undisturbed run."""
    finish(start(recipe(folder, "whole"), forks=True))
    return folder / "runs" / "whole"


@pytest.mark.ray
@pytest.mark.learner
def test_a_run_writes_model_metrics_ledger_and_report(whole: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = rows(whole)
    assert [row["step"] for row in found] == list(range(61))
    assert found[-1]["eval/loss"] < found[0]["eval/loss"] and "eval/loss" in found[30]
    assert found[-1]["learn/loss"] < found[1]["learn/loss"]
    assert max(row.get("memory/driver_peak_mb", 0) for row in found) > 10  # ranks are forked by the tests, and not below the driver
    told = [found[1][f"memory/{name}_mb"] for name in ("learner_least", "learner_predicted", "total_predicted")]
    assert 0 < told[0] < 100 and 600 < told[1] == told[2] - 500, "one rank and the driver"
    assert "Memory on the driver's machine" in (whole / "report.html").read_text()
    status = json.loads((whole / "status.json").read_text())
    assert status["status"] == "done" and status["steps_done"] == status["steps_total"] == 60
    with (whole / "ledger.csv").open() as file:
        ledger = list(csv.DictReader(file))
    worked = [row for row in ledger if row["activity"] == "work" and row["what"] == "update"]
    assert max(int(row["step"]) for row in ledger) == found[-1]["step"], "what follows the last step is no further one"
    assert len({row["step"] for row in worked}) == 60
    assert sum(float(row["money"]) for row in ledger) == pytest.approx(found[-1]["cost/total_money"], rel=0.5)
    for before, after in itertools.pairwise(ledger):  # each second of the lease once
        assert float(after["from_s"]) == pytest.approx(float(before["to_s"]), abs=1e-5)
    page = (whole / "report.html").read_text()
    assert "supervised-loss" in page and "There are no files in samples/" not in page
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    assert AutoTokenizer.from_pretrained(whole / "model").eos_token_id == model.config.eos_token_id


@pytest.mark.ray
@pytest.mark.learner
def test_a_stopped_run_goes_on_and_a_killed_rank_changes_nothing(folder: Path, whole: Path) -> None:
    path, run = recipe(folder, "disturbed"), folder / "runs" / "disturbed"
    process = start(path)
    wait_for_steps(run, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 130 and "continue with --resume" in said, said
    stopped = json.loads((run / "status.json").read_text())
    assert stopped["status"] == "stopped" and DONE_AT_LEAST <= stopped["steps_done"] < 60
    process = start(path, "--resume")
    wait_for_steps(run, process, stopped["steps_done"] + 4)  # with the row of step 0, three more
    (rank,) = ranks_of(process.pid)
    rank.kill()
    said = finish(process)
    assert "the ranks start again from the last checkpoint: " in said and "the ranks go on after step" in said
    assert same(weights(run), weights(whole))
    assert [row["step"] for row in rows(run)] == list(range(61))
    assert sum(row.get("faults/replaced", 0) for row in rows(run)) == 1
    assert [row["learn/loss"] for row in rows(run)[1:]] == [row["learn/loss"] for row in rows(whole)[1:]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["task=sfft"], "`task`: input should be 'sft', 'rm', 'dpo', 'kto', 'kd' or 'prm' (got 'sfft')"),
        (["loss.beta=0.2"], "loss.beta: sft does not use it"),
        (["data.batch_row=4"], "unknown key `data.batch_row`; did you mean `data.batch_rows`?"),
        (["learner.ranks=2", "run.min_ranks=3"], "run.min_ranks: must not exceed learner.ranks"),
        (["learner.ranks=3", "learner.tensor_parallel=3"], "learner.tensor_parallel: 3 does not divide the model's"),
        (["learner.overlap=off"], "learner.overlap: a supervised stage has no rollout"),
        (["learner.pack_rows=true", "lora.rank=4", "lora.dropout=0.1"], "learner.pack_rows: lora.dropout is drawn"),
        (["learner.pack_rows=true", "learner.ranks=2", "learner.sequence_parallel=2"], "learner.pack_rows: with learner.sequence_parallel"),
        (["task=kd"], "teacher.path: name the teacher"),
        (["teacher.path=x"], "teacher.path: sft has no teacher; leave it out"),
        (["task=prm"], "data.placeholder_token: name the token that ends each step"),
        (["task=prm", "data.placeholder_token=x"], "data.task: built-in tasks have no steps with labels"),
        (["data.placeholder_token=x"], "data.placeholder_token: sft has no steps"),
        (["task=dpo", "reference.path=/nowhere"], "reference.path: /nowhere is not a folder"),
        (["data.batch_rows=500", "data.remainder=drop"], "data.batch_rows: the 480 rows do not fill one batch of 500"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, changes: list[str], message: str) -> None:
    said = command_here("train", str(recipe(tmp_path, "bad")), *changes)
    assert said.returncode == 2 and message in said.stderr, said.stderr
    assert said.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("other", ["sort", "chain"])
def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path, other: str) -> None:
    from rlhfless_ray.prompts.builtin_tasks import task
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
    from rlhfless_ray.supervise.run_supervised import SupervisedStage
    from rlhfless_ray.weights.model_folder import write_folder
    from rlhfless_ray.weights.tiny_model import scratch_policy

    tree = yaml.safe_load(recipe(tmp_path, "kd", task="kd", teacher={"path": str(tmp_path / "teacher")}).read_text())
    parsed = SupervisedRecipe.parse(tree)
    write_folder(tmp_path / "teacher", scratch_policy(parsed, task(other)))
    if other == "chain":
        assert SupervisedStage(parsed).second == tmp_path / "teacher"
        return
    with pytest.raises(UserError, match=r"teacher.path: its tokenizer has another vocabulary than that of policy.path \('"):
        SupervisedStage(parsed)


def test_other_commands_say_what_the_recipe_is(tmp_path: Path) -> None:
    recipe(tmp_path, "stage")
    with pytest.raises(UserError, match="`task` makes it a supervised stage; run it with `rlhfless train`"):
        Recipe.load(tmp_path / "stage.yaml")


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    said = command_here("train", str(recipe(tmp_path, "none")), "--resume", "policy.path=/nowhere")  # before anything is read
    assert said.returncode == 2 and "--resume: no run with a checkpoint" in said.stderr
    assert os.listdir(tmp_path) == ["none.yaml"]


@pytest.fixture(scope="module")
def progress(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a checkpoint of the recipe says of its progress."""
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
    from rlhfless_ray.supervise.run_supervised import SupervisedStage
    from rlhfless_ray.weights.same_model import model_sizes

    stage = SupervisedStage(SupervisedRecipe.load(recipe(tmp_path_factory.mktemp("progress"), "a")))
    return {"steps": 8, "order": stage.order.state(), "model": model_sizes(stage.files)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.rows=400"], "data.rows: `480` → `400`; set them back, start a new run without --resume, or go on with --resume-changed"),
        (["data.batch_rows=4"], "data.batch_rows: `8` → `4`"),
        (["run.seed=4"], "run.seed: `3` → `4`"),
        (["data.shuffle=false"], "data.shuffle: `True` → `False`"),
        (["data.remainder=drop", "loss.mean=sequence"], "data.remainder: `short` → `drop`; loss.mean: `token` → `sequence`"),
        (["lora.rank=4"], "lora.rank: .*a was trained with 0, and its checkpoint does not fit 4"),
        (["learner.learning_rate=1e-4"], "learner.learning_rate: `.*` → `0.0001`"),
        (["run.epochs=2", "watch.tensorboard=false"], ""),
        ([], "the checkpoint is of another model: its num_key_value_heads is 99, and that of policy.path is"),
    ],
)
def test_a_resume_does_not_repeat_or_skip_rows(tmp_path: Path, progress: dict[str, Any], changes: list[str], message: str) -> None:
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
    from rlhfless_ray.supervise.run_supervised import SupervisedStage

    path = recipe(tmp_path, "a")
    sizes = progress["model"] | ({} if changes else {"num_key_value_heads": 99})
    checkpoint = tmp_path / "runs" / "a" / "checkpoints" / "checkpoint_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text(json.dumps({**progress, "model": sizes}))
    (tmp_path / "runs" / "a" / "recipe.yaml").write_text(SupervisedRecipe.load(path).to_yaml())
    with pytest.raises(UserError, match=message) if message else nullcontext():
        SupervisedStage(SupervisedRecipe.load(path, changes), resume=True)


def test_references_of_other_rows_or_another_model_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhfless_ray.supervise.train_loop import _Loop

    known: list[Any] = []

    def opened(model: Any, second: Any, data: list[Examples], given: Any, *_: Any) -> Any:
        known.append(given)
        return given or [np.arange(len(examples.lengths)) for examples in data]

    monkeypatch.setattr("ray.train.get_checkpoint", lambda: None)
    loop = _Loop.__new__(_Loop)
    loop.rank, loop.recipe, loop.work = 0, SimpleNamespace(task="dpo"), SimpleNamespace(open=opened)
    loop.start = SimpleNamespace(model=tmp_path, storage=tmp_path, second=None, reward_tokens=None)
    rows, others = (Examples.of([[Example([1, 2, last], 1), Example([1, 2, 4], 1)]], [0.0]) for last in (3, 5))
    for train, loop.start.second in ((rows, None), (rows, None), (rows, tmp_path / "other"), (others, tmp_path / "other")):
        loop._open([train, Examples.of([], [])])
    assert known[0] is None and known[1][0].tolist() == [0, 1] and known[2:] == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_spans_of_all_ranks_are_in_the_ledger_before_their_step(rank: int) -> None:
    from rlhfless_ray.supervise.supervised_rank import StepResult
    from rlhfless_ray.supervise.train_loop import _Loop

    done: list[str] = []
    loop: Any = _Loop.__new__(_Loop)
    loop.rank, loop.ranks, loop.memory = rank, 2, None
    loop._span = lambda *_: "span"
    loop._fetch = lambda answer, _: done.append(answer)
    loop._sum = lambda number: done.append("all ranks") or number
    loop.post = lambda kind, _: bool(done.append(kind))
    assert not loop._report_step(1, StepResult({"loss": 0.5}, 8), 0.0)
    assert done == ["span", "all ranks", *(["step"] if rank == 0 else []), "all ranks"]


@pytest.mark.parametrize("adapters", [0, 4])
def test_a_model_folder_beside_a_checkpoint_is_whole(tmp_path: Path, adapters: int) -> None:
    """With adapters it is the adapter, which names the folder of its base."""
    import torch

    from rlhfless_ray.supervise.train_loop import _Loop
    from rlhfless_ray.weights.tensor_file import save_tensors

    def loop_of(rank: int) -> Any:
        weights = save_tensors({f"layer.{rank}": torch.zeros(2, dtype=torch.bfloat16)}, {"format": "pt"})
        adapter = {} if rank else {"adapter_model.safetensors": weights, "adapter_config.json": b'{"r": 4}'}
        loop: Any = _Loop.__new__(_Loop)
        loop.rank, loop.recipe = rank, SimpleNamespace(task="sft", lora=SimpleNamespace(rank=adapters))
        files = {shard_name("model", rank, 2): weights}
        loop.work = SimpleNamespace(trainer=SimpleNamespace(model_files=lambda trained: adapter if trained else files))
        loop.start = SimpleNamespace(others={"config.json": b'{"dtype": "float32"}', "tokenizer.json": b"{}"}, model=tmp_path / "base")
        loop.start.storage = tmp_path / "checkpoints" / "run"
        loop._fetch, loop._span = lambda files, _: files, lambda *_: None
        return loop

    ranks = [loop_of(0), loop_of(1)]
    together = Barrier(2)
    ranks[0]._sum = ranks[1]._sum = lambda number: 0.0 * together.wait(60)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda loop: loop._save_folder(7), ranks))
    folder = tmp_path / "checkpoints" / "global_step7_hf"
    own = (
        ["adapter_model.safetensors", "adapter_config.json"] if adapters else [INDEX, *(shard_name("model", rank, 2) for rank in range(2))]
    )
    assert sorted(os.listdir(folder)) == sorted([*own, "config.json", "tokenizer.json"])
    assert os.listdir(folder.parent) == [folder.name]
    if adapters:
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config == {"r": 4, "base_model_name_or_path": str(tmp_path / "base")}
    else:
        assert dict(stored_weights(read_files(folder))).keys() == {"layer.0", "layer.1"}
        assert json.loads((folder / "config.json").read_text()) == {"dtype": "bfloat16"}


def test_checkpoints_elsewhere_outlive_the_run_folder(tmp_path: Path) -> None:
    """The newest run with a checkpoint goes on in a folder of its name. A new run of such a name is refused."""
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
    from rlhfless_ray.supervise.find_checkpoints import newest_folder
    from rlhfless_ray.supervise.run_supervised import SupervisedStage

    for name in ("kept/checkpoint_1", "kept-2/checkpoint_2", "kept-3"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
        (tmp_path / "elsewhere" / name / "progress.json").write_text('{"steps": 4}')
    tree = yaml.safe_load(recipe(tmp_path, "kept", checkpoint={"every_steps": 8, "path": str(tmp_path / "elsewhere")}).read_text())
    stage = SupervisedStage.__new__(SupervisedStage)
    stage.recipe, stage.resume = SupervisedRecipe.parse(tree), True
    stage.folder = newest_folder(stage.recipe)
    assert stage._new_folder().path == tmp_path / "runs" / "kept-2"
    with pytest.raises(UserError, match=f"checkpoint.path: {tmp_path}/elsewhere/kept has the checkpoints of another run"):
        SupervisedStage(stage.recipe)
    (tmp_path / "runs" / "kept").mkdir()
    SupervisedStage(stage.recipe)  # the name of the next one is free
