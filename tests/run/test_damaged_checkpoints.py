"""A checkpoint with a file that was changed, torn or lost, what a resume says of it, and the checkpoint before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import CheckpointConfig
from rlhfless_ray.run.checkpoint_files import CHECKSUMS, DamagedCheckpoint, check_files, write_checksums
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.supervise import find_checkpoints as supervised
from rlhfless_ray.weights.remote_folder import writer
from tests.run.test_run_folder import files

OFFER = "continue from the checkpoint before with --resume=previous"


def saved(folder: Path, steps: tuple[int, ...] = (3, 6), path: str = "") -> Checkpoints:
    kept = Checkpoints(CheckpointConfig(keep=5, path=path), folder)
    for step in steps:
        driver = {"step": step, "cursor": {"taken": 8 * step}, "run_folder": str(folder)}
        kept.save(step, writer(files(content=bytes([step]))), driver, ("m", 0.5))
    return kept


def rewrite(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tree = json.loads((folder / "driver.json").read_text())
        where = tree["cursor"] if key == "taken" else tree
        where[key] = value
        (folder / "driver.json").write_text(json.dumps(tree))

    return change


def flip(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return change


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "another place in the prompts": ("driver.json", rewrite("taken", 7)),
    "another step": ("driver.json", rewrite("step", 4)),
    "a new key": ("driver.json", rewrite("other", 1)),
    "a driver's state of zeros": ("driver.json", lambda folder: (folder / "driver.json").write_bytes(b"\0" * 99)),
    "no driver's state": ("driver.json", lambda folder: (folder / "driver.json").unlink()),
    "a bit of the weights": ("model.safetensors", flip("model.safetensors")),
    "no optimizer": ("optimizer.safetensors", lambda folder: (folder / "optimizer.safetensors").unlink()),
    "half an optimizer": ("optimizer.safetensors", lambda folder: (folder / "optimizer.safetensors").write_bytes(b"ooooo")),
    "an empty metric": ("metric.json", lambda folder: (folder / "metric.json").write_bytes(b"")),
    "a bit of the checksums": (CHECKSUMS, flip(CHECKSUMS)),
    "torn checksums": (CHECKSUMS, lambda folder: (folder / CHECKSUMS).write_text('{"files": {"driver')),
    "checksums that are a list": (CHECKSUMS, lambda folder: (folder / CHECKSUMS).write_text("[]")),
    "no checksums": (CHECKSUMS, lambda folder: (folder / CHECKSUMS).unlink()),
}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_changed_file_is_named_and_the_checkpoint_before_is_used(tmp_path: Path, damage: str, elsewhere: bool) -> None:
    kept = saved(tmp_path, path=str(tmp_path / "ckpt") if elsewhere else "")
    name, change = DAMAGES[damage]
    newest = kept.newest()
    assert newest is not None and newest[0] == 6
    change(newest[1])
    with pytest.raises(DamagedCheckpoint, match=rf"^--resume: {newest[1] / name} .*; {OFFER}$"):
        kept.load()
    step, stored, driver = kept.load(previous=True)
    assert step == driver["step"] == 3 and stored.files == files(content=b"\3") and not kept.note
    assert newest[1].is_dir(), "nothing is changed until the run begins"
    said = kept.set_aside_after(step)
    assert "going on after step 3" in said and f"aside_{newest[1].name}" in said
    assert kept.newest() == (3, kept.folder / f"{kept.prefix}3") and kept.load()[0] == 3
    saved(tmp_path, (6,), kept.section.path)
    assert [step for step, _ in kept.list()] == [3, 6] and kept.load()[0] == 6, "the step can be saved again"


def test_an_undamaged_newest_can_be_left_out_too_and_damaged_ones_are_skipped(tmp_path: Path) -> None:
    kept = saved(tmp_path, (2, 4, 6, 8))
    assert kept.load(previous=True)[0] == 6
    flip("model.safetensors")(tmp_path / "checkpoints" / "step_6")
    assert kept.load(previous=True)[0] == 4
    kept.set_aside_after(4)
    assert sorted(path.name for path in kept.folder.iterdir()) == ["aside_step_6", "aside_step_8", "step_2", "step_4"]


def test_nothing_is_offered_where_there_is_nothing_before(tmp_path: Path) -> None:
    kept = saved(tmp_path, (3,))
    rewrite("taken", 1)(tmp_path / "checkpoints" / "step_3")
    with pytest.raises(UserError, match=r"step_3/driver.json differs .*; there is no checkpoint before it, so start without --resume$"):
        kept.load()
    with pytest.raises(UserError, match=r"^--resume=previous: there is no undamaged checkpoint before .*step_3; start without"):
        kept.load(previous=True)


@pytest.mark.parametrize("sums", [True, False])
def test_a_checkpoint_of_an_earlier_version_is_read_and_said_to_be_unverified(tmp_path: Path, sums: bool) -> None:
    """It had checksums of the learner's files in driver.json, or none at all."""
    kept = saved(tmp_path, (3, 5))
    folder = tmp_path / "checkpoints" / "step_5"
    known = json.loads((folder / CHECKSUMS).read_text())["files"]
    (folder / CHECKSUMS).unlink()
    learner = {name: value for name, value in known.items() if name.endswith("safetensors")}
    (folder / "driver.json").write_text(json.dumps({"step": 5, **({"xxh3": learner} if sums else {})}))
    assert kept.load() == (5, kept.load()[1], {"step": 5}) and kept.load()[1].files == files(content=b"\5")
    assert kept.note == f"{folder} has no {CHECKSUMS} (of an earlier version), so its driver.json is taken unverified"
    flip("model.safetensors")(folder)
    if sums:
        with pytest.raises(DamagedCheckpoint, match=r"model.safetensors differs"):
            kept.load()
    rewrite("step", 4)(folder)
    with pytest.raises(DamagedCheckpoint, match=r"differs|driver.json is of step 4"):
        kept.load()


# ---- supervised stages ------------------------------------------------------------------------------------------


def stage_checkpoint(folder: Path, name: str, steps: int, ranks: int = 2) -> Path:
    path = folder / f"checkpoint_{name}"
    path.mkdir(parents=True)
    for rank in range(ranks):
        own = {f"state-{rank}.bin": bytes([rank, steps])}
        if rank == 0:
            own["progress.json"] = json.dumps({"steps": steps, "ranks": ranks}).encode()
        write_checksums(path, writer(dict(own))(path), f"checksums-{rank:05d}-of-{ranks:05d}.json")
    return path


@pytest.mark.parametrize("name", ["state-1.bin", "progress.json"])
def test_a_stages_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    first, second = stage_checkpoint(tmp_path, "a", 4), stage_checkpoint(tmp_path, "b", 8)
    assert supervised.chosen_checkpoint(tmp_path, previous=False) == second and check_files(second)
    text = (second / name).read_bytes()
    (second / name).write_bytes(text.replace(b"8", b"9") if b"8" in text else b"\1\7")
    with pytest.raises(DamagedCheckpoint, match=rf"{second / name} differs .*; {OFFER}$"):
        supervised.chosen_checkpoint(tmp_path, previous=False)
    assert supervised.chosen_checkpoint(tmp_path, previous=True) == first
    (tmp_path / supervised.SNAPSHOT).write_text("{}")
    assert "aside_checkpoint_b" in supervised.set_aside_after(first)
    assert supervised.newest_checkpoint(tmp_path) == first and not (tmp_path / supervised.SNAPSHOT).exists()


def test_a_stages_half_written_checkpoint_is_removed_with_a_word(tmp_path: Path) -> None:
    first, second = stage_checkpoint(tmp_path, "a", 4), stage_checkpoint(tmp_path, "b", 8)
    (second / "checksums-00001-of-00002.json").unlink()  # killed before the second rank's files were copied
    assert supervised.chosen_checkpoint(tmp_path, previous=False) == first
    (said,) = supervised.remove_torn(tmp_path)
    assert said == f"{second} was not complete, as after a kill, and is removed: its steps are repeated" and not second.exists()
    assert supervised.remove_torn(tmp_path) == [] and first.is_dir()
