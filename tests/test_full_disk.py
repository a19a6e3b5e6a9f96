"""A full disk: one sentence, status `failed`, whole files stay whole, and the run goes on once there is space."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from safetensors.numpy import save as save_file

from rlhfless_ray.common import disk_space as disk
from rlhfless_ray.common.disk_space import DiskFull, append, replace_file
from rlhfless_ray.functions import ledger as ledger_module
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.run_sections import WatchConfig
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.report.metrics import Metrics, read_jsonl
from rlhfless_ray.report.progress_display import ProgressDisplay
from rlhfless_ray.report.report import write_report
from rlhfless_ray.report.timeline import write_timeline
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.run.recorder import RunRecorder
from rlhfless_ray.run.responses import ResponseRecord
from rlhfless_ray.runtime.export import put_model
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.supervise import train_loop
from rlhfless_ray.supervise.find_checkpoints import SNAPSHOT, remove_torn, steps_saved
from rlhfless_ray.supervise.rank_recorder import RankRecorder
from rlhfless_ray.supervise.rank_run import RankRun
from rlhfless_ray.supervise.rank_trainer import root_failure
from rlhfless_ray.supervise.run_supervised import SupervisedStage
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId
from rlhfless_ray.weights.remote_folder import writer
from tests.conftest import command_here, small_recipe, write_recipe

MIB = 2**20


class Disk:
    """Writes of this process find space for `left` more bytes; renames, truncation and removals take none. Removing gives back none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.wrote, self.open = os.write, Path.open
        monkeypatch.setattr(os, "write", self._write)
        monkeypatch.setattr(Path, "open", lambda path, *how, **more: self._open(path, *how, **more))

    def room(self, wanted: int) -> int:
        if self.left is None:
            return wanted
        if not self.left and wanted:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(wanted, self.left)
        self.left -= taken
        return taken

    def _write(self, descriptor: int, content: Any) -> int:
        return self.wrote(descriptor, bytes(content[: self.room(len(content))]))

    def _write_bytes(self, write: Callable[[Any], int], content: Any) -> int:
        taken = self.room(len(content))
        write(content[:taken])
        if taken < len(content):
            raise OSError(errno.ENOSPC, "No space left on device")
        return taken

    def _open(self, path: Path, mode: str = "r", *more: Any, **others: Any) -> Any:
        file = self.open(path, mode, *more, **others)
        if mode == "w":
            write = file.write
            return _Wrapped(file, lambda text: write(text[: self.room(len(text))]))
        if mode == "wb":
            write = file.write
            return _Wrapped(file, lambda content: self._write_bytes(write, content))
        return file


class _Wrapped:
    def __init__(self, file: Any, write: Callable[[Any], int]) -> None:
        self.file, self.write = file, write

    def __enter__(self) -> _Wrapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    recipe = Recipe.parse(small_recipe(tmp_path))
    made = RunFolder.create(recipe)
    made.begin(recipe, "machine", 0)
    return made


def record_of(folder: RunFolder) -> RunRecorder:
    return RunRecorder(Recipe.parse(small_recipe(folder.path.parents[1])), folder, Ledger("cpu", 1.0), 0)


def status(folder: RunFolder) -> dict[str, Any]:
    return json.loads((folder.path / "status.json").read_text())


def a_sample() -> Sample:
    done = Completion(0, np.zeros(4, np.int32), np.zeros(4, np.float32), "stop", 0)
    return Sample(Prompt(0, "p", (1, 2)), SampleId(0, 1, 0), done, text="t" * 400)


def hidden(path: Path) -> list[str]:
    return [one.name for one in path.rglob(".*") if one.name != ".reserve"] + [one.name for one in path.rglob("*.new")]


@pytest.mark.parametrize("room", [0, 1, 100])
@pytest.mark.parametrize("name", ["samples", "checkpoint", "model", "export", "status", "report", "timeline", "recipe"])
def test_each_writer_names_its_path_and_leaves_the_old_file(folder: RunFolder, full: Disk, name: str, room: int) -> None:
    recipe = Recipe.parse(small_recipe(folder.path.parents[1]))
    store, state = Checkpoints(recipe.checkpoint, folder.path), {"model.safetensors": b"w" * 5000}
    work: dict[str, tuple[Path, Callable[[], object]]] = {
        "samples": (folder.path / "samples" / "step_1.jsonl", lambda: folder.write_samples(1, [a_sample()], "answer")),
        "checkpoint": (folder.path / "checkpoints" / "step_2", lambda: store.save(2, writer(state), {"step": 2})),
        "model": (folder.path / "model", lambda: folder.write_model(writer(state))),
        "export": (folder.path / "out" / "model.safetensors", lambda: put_model(folder.path / "out", state)),
        "status": (folder.path / "status.json", lambda: folder.write_status(steps_done=1)),
        "report": (folder.path / "report.html", lambda: write_report(folder.path)),
        "timeline": (folder.path / "timeline.json", lambda: write_timeline(folder.path)),
        "recipe": (
            folder.path / "recipe.yaml",
            lambda: folder.begin(recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": 9})}), "machine", 0),
        ),
    }
    path, write = work[name]
    if name != "recipe":
        write()
    before = {one: one.read_bytes() for one in folder.path.rglob("*") if one.is_file() and one.name != ".reserve"}
    full.left = room
    with pytest.raises(DiskFull) as caught:
        write()
    full.left = None
    if name != "recipe":
        assert caught.value.path == path and str(caught.value).startswith(f"{path} cannot be written: the disk is full")
    after = {one: one.read_bytes() for one in folder.path.rglob("*") if one.is_file() and one.name != ".reserve"}
    assert after == before, "the old files are whole, and nothing half-written is left"
    assert hidden(folder.path) == []


@pytest.mark.parametrize("room", [0, 1, 30, 400])
def test_lines_are_appended_whole_or_not_at_all(tmp_path: Path, full: Disk, room: int) -> None:
    path = tmp_path / "lines"
    append(path, b"one\n")
    full.left = room
    with pytest.raises(DiskFull):
        append(path, b"x" * 500 + b"\n")
    assert path.read_bytes() == b"one\n"
    full.left = None
    append(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_quota_is_a_full_disk_and_other_errors_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(number: int) -> None:
        def write(*_: Any) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "open", write)

    failing(errno.EDQUOT)
    with pytest.raises(DiskFull):
        replace_file(tmp_path / "a", b"")
    failing(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(tmp_path / "a", b"")


def test_rows_that_found_no_space_are_written_once_there_is_some(folder: RunFolder, full: Disk) -> None:
    record = record_of(folder)
    record.metrics.write({"step": 1, "reward/mean": 0.5})
    full.left = 20
    with pytest.raises(DiskFull, match=r"metrics\.jsonl cannot be written"):
        record.metrics.write({"step": 2, "reward/mean": 0.75})
    rows, torn = read_jsonl(folder.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1] and not torn
    full.left = None  # what the reserve gives back
    record.close("failed", "no space")
    rows, torn = read_jsonl(folder.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and not torn


def test_a_ledger_has_each_row_once_and_its_header(folder: RunFolder, full: Disk) -> None:
    ledger, path = Ledger("cpu", 1.0), folder.path / "ledger.csv"
    row = ledger_module.Row(**{name: kind() for name, kind in _row_types().items()})
    ledger.rows.append(row)
    full.left = 10
    with pytest.raises(DiskFull, match=r"ledger\.csv cannot be written"):
        ledger.append_to(path)
    full.left = None
    ledger.append_to(path)
    ledger.append_to(path)
    assert len(ledger_module.read_ledger(path)) == 1 and path.read_text().count("from_s") == 1


def _row_types() -> dict[str, type]:
    kinds = {"int": int, "float": float, "str": str}
    return {name: kinds[str(kind)] for name, kind in ledger_module.Row.__annotations__.items()}


@pytest.mark.parametrize(("room", "note"), [(0, 0), (1000, 0), (0, 1500)])
def test_the_status_is_written_on_a_disk_without_any_space(folder: RunFolder, full: Disk, room: int, note: int) -> None:
    """The reserve may be gone to somebody else at once: the status has blocks of its own."""
    folder.write_status(note="x" * note)
    size = (folder.path / "status.json").stat().st_size
    full.left = room
    folder.end("failed", "no space " * 2000)
    assert status(folder)["status"] == "failed" and status(folder)["reason"].startswith("no space")
    assert (folder.path / "status.json").stat().st_size == size, "no more than it had"
    assert not (folder.path / ".reserve").exists()


def test_a_run_that_is_done_but_for_its_last_lines_failed(folder: RunFolder, full: Disk) -> None:
    record = record_of(folder)
    record.metrics.write({"step": 1, "reward/mean": 0.5})
    full.left = 2000
    with pytest.raises(DiskFull):
        record.close("done", "")
    assert status(folder)["status"] == "failed" and "the disk is full" in status(folder)["reason"]


def test_a_failed_run_keeps_its_reason_where_the_last_lines_find_no_space_either(folder: RunFolder, full: Disk) -> None:
    record, said = record_of(folder), []
    record.progress.message = said.append  # type: ignore[method-assign]
    full.left = 0
    record.close("failed", "the reason")
    assert (status(folder)["status"], status(folder)["reason"]) == ("failed", "the reason")
    assert any("report.html is not up to date: the disk is full" in line for line in said)


@pytest.mark.parametrize("room", [0, 2000])
def test_a_supervised_stage_that_finds_no_space_failed(folder: RunFolder, full: Disk, room: int) -> None:
    stage = SupervisedStage.__new__(SupervisedStage)
    stage.recipe = SupervisedRecipe.parse({"task": "sft", "data": {"task": "chain"}})
    stage.folder, stage.progress = folder, ProgressDisplay("off", 1, title="")
    stage.recorder = RankRecorder(stage.recipe, folder, stage.progress, Ledger("cpu"), cast(Any, None))
    stage.recorder.metrics = Metrics(folder.path, WatchConfig(tensorboard=False, wandb="off"), say=lambda _: None)
    stage.recorder.metrics.write({"step": 1})
    full.left = room
    with pytest.raises(DiskFull) as caught:
        stage.recorder.metrics.write({"step": 2, "text": "x" * 5000})
    stage._close(DiskFull, caught.value, None)
    told = status(folder)
    assert told["status"] == "failed" and told["reason"].endswith("then start the run again")
    rows, torn = read_jsonl(folder.path / "metrics.jsonl")
    assert not torn and rows[0] == {"step": 1}


@pytest.mark.parametrize("room", [0, 300])
def test_responses_are_recorded_whole_or_not_at_all(tmp_path: Path, full: Disk, room: int) -> None:
    prompts = [Prompt(number, "p", (1, 2)) for number in range(3)]
    record = ResponseRecord(tmp_path, {"run.seed": 0})
    record.add([replace(a_sample(), prompt=prompts[0])])
    full.left = room
    with pytest.raises(DiskFull):
        record.add([replace(a_sample(), prompt=prompt) for prompt in prompts[1:]])
    full.left = None
    again = ResponseRecord(tmp_path, {"run.seed": 0})
    assert again.missing(prompts, 1, scored=False) == record.missing(prompts, 1, scored=False) == prompts[1:]
    full.left = room
    with pytest.raises(DiskFull):
        record.write(tmp_path / "responses.jsonl", prompts[:1], 1)
    assert {path.name for path in tmp_path.iterdir()} == {"responses.part.jsonl"}


def test_a_record_that_found_no_space_for_its_settings_has_them_later(tmp_path: Path, full: Disk) -> None:
    full.left = 5
    with pytest.raises(DiskFull):
        ResponseRecord(tmp_path, {"run.seed": 0})
    full.left = None
    ResponseRecord(tmp_path, {"run.seed": 0}).add([a_sample()])
    assert not ResponseRecord(tmp_path, {"run.seed": 0}).missing([a_sample().prompt], 1, scored=False)


def test_a_rank_that_finds_no_space_is_a_full_disk() -> None:
    class Failed(Exception):
        worker_failures: ClassVar = {0: OSError(errno.ENOSPC, "No space left on device", "/somewhere/checkpoint")}

    class OfController(Exception):
        controller_failure = OSError(errno.ENOSPC, "Error writing bytes to file")

    for failure, path in (Failed(), "/somewhere/checkpoint"), (OfController(), "/checkpoints"):
        ranks = RankRun.__new__(RankRun)
        ranks.failure = root_failure(failure)
        with pytest.raises(DiskFull, match=f"^{path} cannot be written"):
            ranks.raise_failure(Path("/checkpoints"))


@pytest.mark.parametrize(("free", "fits"), [(80_000, True), (50_000, False)])
def test_a_checkpoint_without_space_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool) -> None:
    (tmp_path / "made" / "model").mkdir(parents=True)
    (tmp_path / "made" / "model" / "x").write_bytes(bytes(10_000))
    loop = train_loop._Loop.__new__(train_loop._Loop)
    loop.start = SimpleNamespace(storage=tmp_path / "ckpt" / "run")  # type: ignore[assignment]
    loop.work, loop.ranks = SimpleNamespace(device="cpu"), 1  # type: ignore[assignment]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free if path == tmp_path else 0))
    with nullcontext() if fits else pytest.raises(DiskFull, match=f"^{tmp_path}/ckpt/run cannot be written"):
        loop._check_space(tmp_path / "made")


def test_a_checkpoint_that_finds_no_space_where_it_is_made_is_a_full_disk_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks hear of it, and Ray Train does not start them again for it."""
    loop = train_loop._Loop.__new__(train_loop._Loop)
    loop.rank, loop.ranks, loop.saved = 1, 2, -1
    loop.work = SimpleNamespace(trainer=SimpleNamespace(state_files=lambda: {"x": b"x"}))  # type: ignore[assignment]
    heard: list[float] = []
    monkeypatch.setattr(loop, "_sum", lambda number: heard.append(number) or number)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def write(folder: Path, files: dict[str, bytes]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_loop, "write_folder", write)
    with pytest.raises(DiskFull, match=f"^{tmp_path} cannot be written"):
        loop._save(3)
    assert heard == [1.0] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tears", ["optimizer-00002-of-00002.safetensors", "optimizer-00001-of-00002.safetensors", "progress.json"])
@pytest.mark.parametrize("is_missing", [True, False])
def test_a_torn_checkpoint_is_removed_and_the_one_before_it_is_taken(tmp_path: Path, tears: str, is_missing: bool) -> None:
    """Ray Train copies the files of a checkpoint in any order, and truncates its list before it writes it."""
    weights = save_file({"a": np.zeros(100)})
    for step in (2, 4):
        folder = tmp_path / f"checkpoint_2026-01-01_00-00-0{step}"
        folder.mkdir()
        (folder / "progress.json").write_text(f'{{"steps": {step}}}')
        for rank in (1, 2):
            (folder / f"optimizer-0000{rank}-of-00002.safetensors").write_bytes(weights)
    assert steps_saved(tmp_path) == 4
    (folder / tears).unlink() if is_missing else (folder / tears).write_bytes(b"" if tears == "progress.json" else weights[:-1])
    (tmp_path / SNAPSHOT).write_text("")
    assert steps_saved(tmp_path) == 2
    remove_torn(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2026-01-01_00-00-02"]


def test_after_a_full_disk_only_a_checkpoint_that_may_find_space_is_tried(tmp_path: Path) -> None:
    run = Runtime.__new__(Runtime)
    run.parts = SimpleNamespace(state=SimpleNamespace(checkpoints=SimpleNamespace(folder=tmp_path / "checkpoints")))  # type: ignore[assignment]
    assert run._has_no_space(DiskFull(tmp_path / "checkpoints" / "step_2"))
    assert not run._has_no_space(DiskFull(tmp_path / "metrics.jsonl")) and not run._has_no_space(OSError(errno.ENOSPC, ""))


@pytest.mark.parametrize("room", [0, 100, disk.Reserve.SIZE])
def test_a_run_without_space_to_begin_leaves_nothing(tmp_path: Path, full: Disk, room: int) -> None:
    recipe, full.left = Recipe.parse(small_recipe(tmp_path)), room
    with pytest.raises(DiskFull):
        RunFolder.create(recipe)
    assert not any((tmp_path / "runs").iterdir())


def test_a_run_that_finds_no_space_for_its_first_status_failed(tmp_path: Path, full: Disk) -> None:
    recipe = Recipe.parse(small_recipe(tmp_path))
    run = Runtime.__new__(Runtime)
    run.recipe, run.folder = recipe, RunFolder.create(recipe)
    full.left = 100
    with pytest.raises(DiskFull) as caught:
        run.folder.begin(recipe, "machine", 0)
    full.left = None  # what the reserve gives back
    run._end_folder(DiskFull, caught.value, None)
    assert status(run.folder)["status"] == "failed" and status(run.folder)["reason"].endswith("start the run again")


def test_the_status_says_how_to_go_on_as_the_command_does(folder: RunFolder) -> None:
    """Also of an error from a library, and whether or not there is a checkpoint."""
    run = Runtime.__new__(Runtime)
    run.folder, run.recipe = folder, Recipe.parse(small_recipe(folder.path.parents[1]))
    full_disks = DiskFull(folder.path / "x"), OSError(errno.ENOSPC, "No space left on device", "/somewhere/file")
    for error in full_disks:
        assert run._outcome(error)[0] == "failed" and run._outcome(error)[1].endswith("then start the run again")
    Checkpoints(run.recipe.checkpoint, folder.path).save(1, writer({}), {})
    for error in full_disks:
        assert run._outcome(error)[1].endswith("then continue the run with --resume")


def test_an_error_from_a_library_becomes_the_same_sentence(folder: RunFolder) -> None:
    run = Runtime.__new__(Runtime)
    run.folder, run.recipe = folder, Recipe.parse(small_recipe(folder.path.parents[1]))
    error = OSError(errno.ENOSPC, "No space left on device", "/somewhere/file")
    with pytest.raises(DiskFull, match=r"/somewhere/file cannot be written: the disk is full .* start the run again$"):
        run._raise_reported_error(OSError, error, None)
    Checkpoints(run.recipe.checkpoint, folder.path).save(1, writer({}), {})
    with pytest.raises(DiskFull, match=r"then continue the run with --resume$"):
        run._raise_reported_error(OSError, error, None)
    run._raise_reported_error(OSError, OSError(errno.EIO, "Input/output error"), None)


# ---- a real one ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little space."""
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={8 * MIB}", "tmpfs", str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a file system is not permitted here: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(path: Path) -> None:
    """Take all space that is left, to the byte."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_a_full_file_system_keeps_files_and_has_a_place_for_the_status(small_disk: Path) -> None:
    recipe = Recipe.parse(small_recipe(small_disk))
    folder = RunFolder.create(recipe)
    folder.begin(recipe, "machine", 0)
    record = record_of(folder)
    store = Checkpoints(recipe.checkpoint, folder.path)
    store.save(1, writer({"model.safetensors": b"w" * MIB}), {"step": 1})
    record.metrics.write({"step": 1})
    fill(small_disk / "filler")
    with pytest.raises(DiskFull):
        store.save(2, writer({"model.safetensors": b"w" * MIB}), {"step": 2})
    with pytest.raises(DiskFull):
        for step in range(2, 100):
            record.metrics.write({"step": step, "text": "x" * 500})
    record.close("failed", "the disk is full")
    assert status(folder)["status"] == "failed"
    assert [step for step, _ in store.list()] == [1] and store.load()[1].files == {"model.safetensors": b"w" * MIB}
    rows, torn = read_jsonl(folder.path / "metrics.jsonl")
    assert not torn and [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert hidden(folder.path) == []


FILLS = '''
import errno, pathlib
calls = 0
def shorter(prompt, response, row):
    """Fills the disk once there is a second checkpoint."""
    disk = pathlib.Path({disk!r})
    if (disk / "runs/small/checkpoints/step_2").exists() and not (disk / "made").exists():
        (disk / "made").mkdir()
        with (disk / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return -len(response) / 10
'''


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.parametrize("by", ["filler", pytest.param("checkpoints", marks=pytest.mark.long)])
def test_a_run_ends_with_one_sentence_and_goes_on_when_there_is_space(private_ray: None, tmp_path: Path, small_disk: Path, by: str) -> None:
    """`filler`: somebody else takes the space, and samples are the first to find none. `checkpoints`: the run's own do."""
    recipe = write_recipe(
        tmp_path,
        run__root=str(small_disk / "runs"),
        run__steps=5,
        checkpoint__every_steps=1,
        evaluate__every_steps=0,
        checkpoint__keep=2 if by == "filler" else 100,
        watch__tensorboard=by == "filler",
    )
    if by == "filler":
        (tmp_path / "reward_file.py").write_text(FILLS.format(disk=str(small_disk)))
    else:
        _resize(small_disk, 4 * MIB)
    run = small_disk / "runs" / "small"

    done = command_here("train", recipe)
    assert done.returncode == 1, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("run failed: ")]
    assert sentence.startswith(f"run failed: {run}/") and sentence.endswith(
        "cannot be written: the disk is full (or its quota used up); make space there, then continue the run with --resume"
    )
    assert "Traceback" not in done.stderr
    told = json.loads((run / "status.json").read_text())
    assert told["status"] == "failed" and "the disk is full" in told["reason"] and told["ended_at"]
    kept = Checkpoints(Recipe.load(Path(recipe), []).checkpoint, run)
    newest = kept.load()[0]
    assert newest >= (2 if by == "filler" else 0) and told["steps_done"] >= newest
    rows, torn = read_jsonl(run / "metrics.jsonl")
    assert not torn and {row["step"] for row in rows} >= set(range(newest))
    for path in (run / "samples").iterdir():
        assert all(json.loads(line) for line in path.read_text().splitlines())
    assert hidden(run) == []

    (small_disk / "filler").unlink(missing_ok=True)
    _resize(small_disk, 64 * MIB)
    again = command_here("train", recipe, "--resume")
    assert again.returncode == 0, again.stderr
    rows, torn = read_jsonl(run / "metrics.jsonl")
    assert not torn and {row["step"] for row in rows} >= set(range(newest + 1, 6))
    assert json.loads((run / "status.json").read_text())["status"] == "done" and (run / "model" / "model.safetensors").is_file()
    assert not (run / ".reserve").exists() and disk.Reserve.SIZE < MIB


def _resize(where: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(where)], check=True)
