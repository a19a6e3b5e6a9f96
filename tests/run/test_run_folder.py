from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from rlhfless_ray.common import folders
from rlhfless_ray.common.disk_space import DiskFull
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import CheckpointConfig, Recipe
from rlhfless_ray.run import checkpoints as saving
from rlhfless_ray.run import folder as module
from rlhfless_ray.run.checkpoint_files import driver_state
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.run.put_model import put_model
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId, Scored, Trained
from rlhfless_ray.weights.remote_folder import Writer, writer
from rlhfless_ray.weights.same_model import model_sizes

# not "fork": this process may have threads of Ray, and its child would wait for ever for a lock that one of them held
APART = multiprocessing.get_context("forkserver")
APART.set_forkserver_preload([__name__])


def recipe(root: Path, name: str = "try") -> Recipe:
    run = {"root": str(root), "name": name, "steps": 7}
    return Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "run": run})


def store(folder: RunFolder, keep: int = 2) -> Checkpoints:
    return Checkpoints(CheckpointConfig(keep=keep), folder.path)


def files(size: int = 10, content: bytes = b"w") -> dict[str, bytes]:
    return {"model.safetensors": content * size, "optimizer.safetensors": b"o" * size}


def learner(size: int = 10, content: bytes = b"w") -> Writer:
    return writer(files(size, content))


# ---- names ------------------------------------------------------------------------------------------------------


def test_names_never_clash(tmp_path: Path) -> None:
    found = []

    def create() -> None:
        for _ in range(5):
            found.append(RunFolder.create(recipe(tmp_path / "runs")).path)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 40
    assert {p.name for p in found} == {"try", *(f"try-{n}" for n in range(2, 41))}
    assert Recipe.load(found[17] / "recipe.yaml") == recipe(tmp_path / "runs")


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run.root .*: cannot make a run folder there"):
        RunFolder.create(recipe(tmp_path / "file"))


@pytest.mark.parametrize("root", ["file", "file/below", "dangling", "/proc/runs"])
def test_a_root_is_checked_before_anything_starts(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    with pytest.raises(UserError, match=r"^run.root \S+: cannot make a run folder there: [A-Z][a-z -]+$"):
        RunFolder.check_root(recipe(tmp_path / root))


def test_a_full_disk_is_found_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_ray.run.folder.Reserve.SIZE", 1 << 60)
    monkeypatch.setattr("rlhfless_ray.run.folder.os.urandom", full_disk)
    with pytest.raises(DiskFull, match=rf"^{tmp_path}/new cannot be written: the disk is full .* then start the run again$"):
        RunFolder.check_root(recipe(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def full_disk(_: int) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.csv", "checkpoints", "."])
def test_a_run_folder_that_cannot_be_written_to_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A stand-in for a read-only mount: a superuser writes whatever modes say."""
    folder, refused = begun(tmp_path), tmp_path / "try" / name
    (folder.path / "metrics.jsonl").write_text("")
    (folder.path / "ledger.csv").write_text("")
    folder.check_resumable()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != refused and access(path, mode))
    if name == ".":
        monkeypatch.setattr("rlhfless_ray.run.folder.tempfile.TemporaryFile", read_only)
    with pytest.raises(UserError, match=rf"^--resume: {refused} cannot be written to: \S.*; make it writable, or copy the run"):
        folder.check_resumable()


def read_only(dir: Path) -> NoReturn:
    raise OSError(errno.EROFS, "Read-only file system", str(dir / "tmp1"))


def test_latest_is_the_one_written_last_that_has_a_checkpoint(tmp_path: Path) -> None:
    assert RunFolder.latest(recipe(tmp_path)) is None
    with pytest.raises(UserError, match="no run with a checkpoint"):
        RunFolder.resumed(recipe(tmp_path))
    folders = [RunFolder.create(recipe(tmp_path)) for _ in range(4)]
    with pytest.raises(UserError, match="start it without --resume"):
        RunFolder.resumed(recipe(tmp_path))
    for age, folder in zip((30, 20, 10), folders, strict=False):
        folder.begin(recipe(tmp_path), "machine", 0)
        store(folder, 2).save(1, learner(), {})
        os.utime(folder.path / "status.json", (time.time() - age,) * 2)
    folders[3].begin(recipe(tmp_path), "machine", 0)  # the newest, without a checkpoint
    for other in ("try-again", "tryx", "try-2-3"):
        RunFolder(tmp_path / other).path.mkdir()
        store(RunFolder(tmp_path / other), 2).save(9, learner(), {})
    assert RunFolder.latest(recipe(tmp_path)).path.name == "try-3"
    os.utime(folders[0].path / "status.json")
    assert RunFolder.latest(recipe(tmp_path)).path.name == "try"


# ---- resuming -----------------------------------------------------------------------------------------------------


def begun(root: Path, step: int = 4) -> RunFolder:
    folder = RunFolder.create(recipe(root))
    folder.begin(recipe(root), "machine", 0)
    store(folder, 2).save(step, learner(), {})
    return folder


def changed(root: Path, section: str, **fields: Any) -> Recipe:
    tree = recipe(root).model_dump()
    tree[section].update(fields)
    return Recipe.parse(tree)


def test_more_steps_done_than_asked_for_is_named(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(UserError, match=r"run.steps: .*try has done 4 steps already, more than 3; raise it"):
        RunFolder.resumed(changed(tmp_path, "run", steps=3))
    assert RunFolder.resumed(changed(tmp_path, "run", steps=4)).path.name == "try"


def test_groups_in_flight_are_not_lost_by_a_resume_without_partial_rollouts(tmp_path: Path) -> None:
    store(begun(tmp_path), 2).save(5, learner(), {"in_flight": [{"row": 3}, {"row": 7}]})
    with pytest.raises(UserError, match=r"rollout.partial: the checkpoint of step 5 has 2 groups in flight, which would be lost; set it"):
        RunFolder.resumed(changed(tmp_path, "run", steps=9))
    RunFolder.resumed(changed(tmp_path, "rollout", partial="continue", max_lag_steps=1))


@pytest.mark.parametrize(("section", "key", "value"), [("policy", "hidden_size", 96), ("prompts", "task", "sort"), ("lora", "rank", 4)])
def test_another_policy_cannot_go_on_from_a_checkpoint(tmp_path: Path, section: str, key: str, value: Any) -> None:
    begun(tmp_path)
    with pytest.raises(UserError, match=rf"^{section}.{key}: .*try was trained with \w+, and its checkpoint does not fit {value}; set it"):
        RunFolder.resumed(changed(tmp_path, section, **{key: value}))


def test_a_resume_with_other_rows_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    store(begun(tmp_path), 2).save(5, learner(), {"cursor": Cursor(11, 2, True, 0).state()})
    run = Runtime.__new__(Runtime)
    run.recipe, run.folder, run.resume = recipe(tmp_path), RunFolder(tmp_path / "try"), True
    run.previous = run.resume_changed = False
    run.inputs = SimpleNamespace(files={}, cursor=Cursor(10, 2, True, 0), contents={})  # type: ignore[assignment]
    with pytest.raises(UserError, match="the number of training rows was 11"):
        run._open_folder()  # which comes before the status and the recipe are written


def test_a_checkpoint_of_another_model_is_refused_before_ray(tmp_path: Path) -> None:
    """By the sizes of its configuration. The folder of a model may move, and be saved again with fewer or more keys."""

    def resumed(state: dict[str, Any], **config: Any) -> None:
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        store(begun(root), 2).save(5, learner(), {"cursor": Cursor(11, 2, True, 0).state(), **state})
        run = Runtime.__new__(Runtime)
        run.recipe, run.folder, run.resume = recipe(root), RunFolder(root / "try"), True
        run.previous = run.resume_changed = False
        files = {"config.json": json.dumps(config).encode()}
        run.inputs = SimpleNamespace(files=files, cursor=Cursor(11, 2, True, 0), contents={})  # type: ignore[assignment]
        run._open_folder()

    was = model_sizes({"config.json": b'{"model_type": "llama", "hidden_size": 64, "rms_norm_eps": 1e-5}'})
    assert was == {"model_type": "llama", "hidden_size": 64}
    resumed({"model": was}, model_type="llama", hidden_size=64, vocab_size=9)
    resumed({}, model_type="qwen2", hidden_size=96)  # a checkpoint of an earlier version of this program
    with pytest.raises(UserError, match=r"^--resume: the checkpoint is of another model: its hidden_size is 64, and .* is 96"):
        resumed({"model": was}, model_type="llama", text_config={"hidden_size": 96})


def test_a_refused_resume_of_checkpoints_elsewhere_leaves_no_folder(tmp_path: Path) -> None:
    mine = changed(tmp_path, "checkpoint", path=str(tmp_path / "elsewhere"))
    driver = {"cursor": Cursor(11, 2, True, 0).state(), "run_folder": str(tmp_path / "try")}
    Checkpoints(mine.checkpoint, tmp_path / "try").save(5, learner(), driver)
    run = Runtime.__new__(Runtime)
    run.recipe, run.previous, run.resume_changed = mine, False, False
    run.inputs = SimpleNamespace(cursor=Cursor(10, 2, True, 0), contents={})  # type: ignore[assignment]
    with pytest.raises(UserError, match="the number of training rows was 11"):
        run._folder_to_resume()
    assert not (tmp_path / "try").exists()
    run.inputs.cursor = Cursor(11, 2, True, 0)
    assert run._folder_to_resume().path == tmp_path / "try" and (tmp_path / "try").is_dir()


@pytest.mark.parametrize(("key", "value"), [("alpha", 32), ("target_modules", ["q_proj"])])
def test_adapters_go_on_with_the_scale_and_layers_that_they_were_trained_with(tmp_path: Path, key: str, value: Any) -> None:
    begun(tmp_path)
    adapted = changed(tmp_path, "lora", rank=4)
    (tmp_path / "try" / "recipe.yaml").write_text(adapted.to_yaml())
    assert RunFolder.resumed(adapted).path.name == "try"
    with pytest.raises(UserError, match=rf"^lora.{key}: .*try was trained with .*, and its checkpoint does not fit"):
        RunFolder.resumed(changed(tmp_path, "lora", rank=4, **{key: value}))


def test_a_kl_term_cannot_come_with_a_resume(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    with_kl = changed(tmp_path, "algorithm", kl={"coefficient": 0.1})
    with pytest.raises(UserError, match=r"algorithm.kl.coefficient: .*kept no reference policy, so it must stay 0"):
        RunFolder.resumed(with_kl)
    (folder.path / "reference").mkdir()
    RunFolder.resumed(with_kl)


def hold(path: Path) -> None:
    with RunFolder(path).locked():
        (path / "held").touch()
        time.sleep(60)


@pytest.mark.slow
def test_one_process_at_a_time_writes_into_a_folder(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    process = APART.Process(target=hold, args=(folder.path,))
    process.start()
    while not (folder.path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match=rf"--resume: .*try is being written by process {os.getpid()} on"), folder.locked():
        raise AssertionError("two at once")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    for _ in range(2):  # a dead owner's lock is gone, and so is one's own after the block
        with folder.locked():
            pass


def test_where_folders_cannot_be_locked_the_status_must_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(tmp_path)

    def no_locks(*_: Any) -> None:
        raise OSError("bad file descriptor")

    monkeypatch.setattr(folders.fcntl, "flock", no_locks)
    with pytest.raises(UserError, match="is being written by process"), folder.locked():
        raise AssertionError("this very process is alive and running")
    folder.end("stopped")
    with folder.locked():
        pass


def test_a_resume_keeps_the_beginning_and_both_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(tmp_path)
    started = folder.status["started_at"]
    monkeypatch.setattr(module, "_now", lambda: "2031-01-01T00:00:00+0000")
    new = changed(tmp_path, "run", steps=9)
    again = RunFolder.resumed(new)
    again.begin(new, "machine", 4)
    assert again.status["started_at"] == started and again.status["resumed_at"] == ["2031-01-01T00:00:00+0000"]
    assert Recipe.load(folder.path / "recipe.yaml") == new
    assert Recipe.load(folder.path / "recipe_until_step_4.yaml") == recipe(tmp_path)
    again.begin(new, "machine", 4)
    assert len(again.status["resumed_at"]) == 2 and len(list(folder.path.glob("recipe*"))) == 2
    third = changed(tmp_path, "run", steps=11)
    again.begin(third, "machine", 4)
    assert Recipe.load(folder.path / "recipe.yaml") == third
    assert Recipe.load(folder.path / "recipe_until_step_4.yaml") == recipe(tmp_path), "the second one has completed no step"


# ---- checkpoints ------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert store(folder).list() == []
    driver = {"step": 3, "cursor": [1, 2.5, None], "history": {"7": 0.1 + 0.2}}
    store(folder, 1).save(3, learner(1000), driver)
    step, stored, found = store(RunFolder(tmp_path)).load()
    assert (step, stored.files, found) == (3, files(1000), driver)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    folder = RunFolder(tmp_path)
    for step in (8, 9, 10, 11, 100):  # by number, not by name
        store(folder, keep).save(step, learner(content=bytes([step])), {"step": step})
    left = [8, 9, 10, 11, 100][-keep:]
    assert [step for step, _ in store(folder).list()] == left
    assert store(folder).load()[0] == 100
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == sorted(f"step_{s}" for s in left)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store(folder, 2).save(2, writer({**files(), "extra": b""}), {"a": 1})
    store(folder, 2).save(2, learner(content=b"n"), {"a": 2})
    step, stored, driver = store(folder).load()
    assert (step, stored.files, driver) == (2, files(content=b"n"), {"a": 2})


@pytest.mark.parametrize("dies_in", ["writer", "exchange", "replace", "rmtree"])
@pytest.mark.parametrize("step", [5, 6])
def test_dying_at_any_point_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str, step: int) -> None:
    """Also while step 5 itself is saved again, as a run does that is stopped right after it was resumed."""
    folder = RunFolder(tmp_path)
    store(folder, 1).save(5, learner(), {"step": 5})

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def torn(path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"w")
        die()

    def half_removed(path: Path, **_: Any) -> None:
        if path.exists():
            next(path.iterdir()).unlink()
            die()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        write = learner(content=b"n")
        if dies_in == "writer":
            write = torn  # type: ignore[assignment]
        else:
            if dies_in == "replace":  # of a file system that cannot exchange folders
                patch.setattr(saving, "_exchange", lambda first, second: False)
            places = {"exchange": (saving, "_exchange", die), "replace": (saving.os, "replace", die)}
            where = places.get(dies_in, (saving.shutil, "rmtree", half_removed))
            patch.setattr(*where)
        store(folder, 1).save(step, write, {"step": step})
    if not (dies_in == "replace" and step == 5):  # the one instant in which the old one is aside and the new one not there
        found, stored, driver = store(RunFolder(tmp_path)).load()
        assert driver == {"step": found} and stored.files in (files(), files(content=b"n"))
    assert all(len(list(path.iterdir())) == 4 for _, path in store(RunFolder(tmp_path)).list())
    store(folder, 1).save(7, learner(), {"step": 7})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_7"], "what was left over is cleared away"


def save_for_ever(path: Path) -> None:
    folder = RunFolder(path)
    step = 0
    while True:
        step += 1
        store(folder, 2).save(step, learner(300_000, bytes([step % 250])), {"step": step})


def test_a_killed_process_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for trial in range(6):
        path = tmp_path / str(trial)
        process = APART.Process(target=save_for_ever, args=(path,))
        path.mkdir()
        process.start()
        while not store(RunFolder(path)).list():
            time.sleep(0.002)
        time.sleep(float(rng.uniform(0, 0.03)))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = store(RunFolder(path)).list()
        assert found
        for step, folder in found:
            assert driver_state(folder)["step"] == step
            assert (folder / "model.safetensors").read_bytes() == bytes([step % 250]) * 300_000
            assert len(list(folder.iterdir())) == 4
        shutil.rmtree(path)


def test_the_model_is_replaced_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_model(writer({"config.json": b"1", "old.txt": b""}))
    path = folder.write_model(writer({"config.json": b"2", "model.safetensors": b"\x00"}))
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {"config.json": b"2", "model.safetensors": b"\x00"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


# ---- samples and status -----------------------------------------------------------------------------------------


def test_samples_are_one_json_object_per_line(tmp_path: Path) -> None:
    prompt = Prompt(12, 'say "ä\n"', (1, 2), {"answer": np.int64(4), "other": 1})
    done = [Completion(k, np.arange(k + 1), np.zeros(k + 1), reason, 3) for k, reason in ((0, "stop"), (5, "length"))]
    samples = [
        Trained(prompt, SampleId(prompt.index, 1, 0), done[0], "line\nbreak", reward=1.0, advantage=0.5),
        Scored(prompt, SampleId(prompt.index, 1, 1), done[1], "", error="ValueError: no"),
        Sample(prompt, SampleId(prompt.index, 1, 2), done[0], "not scored"),
    ]
    RunFolder(tmp_path).write_samples(4, samples, "answer")
    rows = [json.loads(line) for line in (tmp_path / "samples" / "step_4.jsonl").read_text().splitlines()]
    same = {"step": 4, "prompt_index": 12, "prompt": 'say "ä\n"', "version": 3, "answer": "4"}
    first = {"sample": 0, "response": "line\nbreak", "tokens": 1, "finish": "stop", "reward": 1.0, "error": None, "advantage": 0.5}
    second = {"sample": 1, "response": "", "tokens": 6, "finish": "length", "reward": None, "error": "ValueError: no", "advantage": None}
    third = {**first, "sample": 2, "response": "not scored", "reward": None, "advantage": None}
    assert rows == [{**same, **first}, {**same, **second}, {**same, **third}]
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["step_4.jsonl"]


def test_status_is_readable_at_every_moment(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(recipe(tmp_path), "x86, 2 slots", 3)
    path = tmp_path / "status.json"
    begun = json.loads(path.read_text())
    assert (begun["status"], begun["steps_done"], begun["steps_total"], begun["ended_at"]) == ("running", 3, 7, None)
    assert begun["pid"] == os.getpid() and "python" in begun["versions"] and begun["machine"] == "x86, 2 slots"
    torn: list[str] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                json.loads(path.read_text())
            except ValueError as error:
                torn.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(300):
        folder.write_status(steps_done=step, padding="x" * (step * 37 % 5000))
    over.set()
    reader.join()
    assert torn == []
    folder.end("failed", "why")
    ended = json.loads(path.read_text())
    assert (ended["status"], ended["reason"], ended["steps_done"]) == ("failed", "why", 299) and ended["ended_at"]


def test_folders_that_ray_deletes_after_the_job_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    inside, outside = recipe(unpacked / "runs"), recipe(tmp_path / "runs")
    assert RunFolder.create(inside).deletion_note(inside).startswith(f"run.root: {unpacked / 'runs'}")
    folder = RunFolder.create(outside)
    assert not folder.deletion_note(outside)
    monkeypatch.chdir(unpacked)
    outside = outside.with_settings({"checkpoint.path": "ckpt", "save.path": str(tmp_path / "saved")})
    assert folder.deletion_note(outside).startswith("checkpoint.path: ckpt in the working folder that Ray unpacked for this job")


def test_a_model_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    """transformers takes one file before an index of several, and would load the old weights."""
    put_model(tmp_path, {"model.safetensors": b"one", "adapter_config.json": b"{}", "config.json": b"1"})
    shards = {"model-00001-of-00002.safetensors": b"a", "model-00002-of-00002.safetensors": b"b", "model.safetensors.index.json": b"{}"}
    (tmp_path / "notes.txt").write_text("mine")
    put_model(tmp_path, shards)
    assert {file.name for file in tmp_path.iterdir()} == {*shards, "config.json", "notes.txt"}
    put_model(tmp_path, {"adapter_model.safetensors": b"c"})
    assert {file.name for file in tmp_path.iterdir()} == {*shards, "config.json", "notes.txt", "adapter_model.safetensors"}


def test_a_status_that_is_left_to_the_watcher_is_written_by_nobody_else(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.leave_status()
    before = (folder.path / "status.json").read_bytes()
    folder.write_status(steps_done=5)
    folder.end("failed", "the learner died")
    assert (folder.path / "status.json").read_bytes() == before
