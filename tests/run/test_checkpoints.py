"""Checkpoints in OpenRLHF's layout: names, which stay, the best, and what another program left there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import CheckpointConfig, Recipe
from rlhfless_ray.run import checkpoints as module
from rlhfless_ray.run.checkpoints import Best, Checkpoints, swap_folder
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.weights.remote_folder import writer

FILES = {"model.safetensors": b"w" * 10, "optimizer.safetensors": b"o" * 10}
LEARNER = writer(FILES)
MODEL = writer({"config.json": b"{}", **FILES})


def store(tmp_path: Path, **section: Any) -> Checkpoints:
    return Checkpoints(CheckpointConfig(path=str(tmp_path / "ckpt"), **section), tmp_path / "run")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folders_and_the_name_of_the_newest(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=2, save_hf=True)
    for step in (2, 4, 6):
        kept.save(step, LEARNER, {"step": step}, ("eval_x_pass1", step / 10), MODEL)
    assert names(tmp_path / "ckpt" / "_actor") == ["global_step4", "global_step6", "latest"]
    assert (tmp_path / "ckpt" / "_actor" / "latest").read_text() == "global_step6"
    assert names(tmp_path / "ckpt") == ["_actor", "global_step2_hf", "global_step4_hf", "global_step6_hf"]
    assert json.loads((tmp_path / "ckpt" / "_actor" / "global_step6" / "metric.json").read_text()) == {
        "metric_key": "eval_x_pass1",
        "metric_value": 0.6,
    }
    step, stored, driver = kept.load()
    assert (step, stored.files, driver) == (6, FILES, {"step": 6})
    assert names(tmp_path / "ckpt" / "global_step2_hf") == sorted(["config.json", *FILES])


def test_first_go_those_without_metric_then_the_worst_then_the_oldest(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=3)
    order = [(1, 0.5), (2, None), (3, 0.2), (4, 0.5), (5, 0.4), (6, None)]
    left = []
    for step, value in order:
        kept.save(step, LEARNER, {}, None if value is None else ("m", value))
        left.append([step for step, _ in kept.list()])
    assert left == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 4, 5], [1, 4, 6]]


def test_a_new_run_outlives_the_higher_steps_of_an_earlier_one_in_the_same_folder(tmp_path: Path) -> None:
    for number, steps in enumerate([(8, 9, 10), (1, 2, 3)]):
        kept = store(tmp_path, keep=3)
        for step in steps:
            kept.save(step, LEARNER, {"run": number})
            os.utime(kept.folder / f"global_step{step}", (0, 100 * number + step))
    assert [step for step, _ in kept.list()] == [1, 2, 3] and kept.load()[2] == {"run": 1}


def test_a_limit_in_bytes_leaves_the_newest(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=9, max_gib=600 / 2**30)
    for step in (1, 2, 3, 4):
        kept.save(step, LEARNER, {})
    assert [step for step, _ in kept.list()] == [3, 4]
    tight = store(tmp_path, keep=9, max_gib=1 / 2**30)
    tight.save(5, LEARNER, {})
    assert [step for step, _ in tight.list()] == [5]


def test_one_best_stays_beside_the_others(tmp_path: Path) -> None:
    kept, best = store(tmp_path, keep=1, save_hf=True), Best("")
    for step, value in [(1, 0.3), (2, 0.6), (3, 0.5)]:
        metric = best.read_metric({"eval/a/pass1": value, "eval/a/pass4": 0.9, "eval/length_mean": 3.0})
        assert metric == ("eval_a_pass1", value)
        if best.improved(metric):
            kept.save_best(step, LEARNER, {}, metric, MODEL)
        kept.save(step, LEARNER, {}, metric)
    assert names(tmp_path / "ckpt" / "_actor") == ["best_global_step2", "global_step3", "latest"]
    assert "best_global_step2_hf" in names(tmp_path / "ckpt") and "best_global_step1_hf" not in names(tmp_path / "ckpt")
    assert not best.improved(("eval_a_pass1", 0.6)) and not best.improved(None)


def test_an_evaluation_that_could_not_score_the_metrics_source_ends_no_run() -> None:
    for name in ("eval_a_pass1", ""):
        best, later = Best(name), {"eval/a/length_mean": 3.0, "eval/b/pass1": 0.9}
        assert best.read_metric({"eval/a/pass1": 0.5, "eval/b/pass1": 0.1}) == ("eval_a_pass1", 0.5)
        assert best.read_metric(later) is None, "and no other source stands in for it"
        resumed = Best("eval_a_pass1")
        resumed.value = 0.5
        assert resumed.read_metric(later) is None


def test_a_metric_goes_by_its_name_there_and_here(tmp_path: Path) -> None:
    evaluation = {"eval/a/pass1": 0.25, "eval/accuracy_sampled": 0.5, "eval/length_mean": 3.0}
    for name, value in [("eval_a_pass1", 0.25), ("eval/a/pass1", 0.25), ("accuracy_sampled", 0.5), ("eval_response_length_mean", 3.0)]:
        found = Best(name).read_metric(evaluation)
        assert found is not None and found[1] == value
    assert Best("none").read_metric(evaluation) is None and Best("").read_metric({}) is None
    with pytest.raises(UserError, match="the evaluation has no `eval_b_pass1`, only"):
        Best("eval_b_pass1").read_metric(evaluation)


def test_models_only_where_nothing_is_to_be_resumed(tmp_path: Path) -> None:
    store(tmp_path, resumable=False).save(3, LEARNER, {}, None, MODEL)
    assert names(tmp_path / "ckpt") == ["global_step3_hf"]


def test_checkpoints_of_deepspeed_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    theirs = tmp_path / "ckpt" / "_actor" / "global_step9"
    theirs.mkdir(parents=True)
    (theirs / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (theirs.parent / "latest").write_text("global_step9")
    for look in (store(tmp_path).newest, store(tmp_path).check):
        with pytest.raises(UserError, match=r"checkpoint of DeepSpeed.*global_step9_hf"):
            look()


def test_a_run_goes_on_in_its_folder_or_in_a_new_one(tmp_path: Path) -> None:
    def recipe(**checkpoint: Any) -> Recipe:
        return Recipe.parse(
            {
                "prompts": {"task": "chain"},
                "reward": {"function": "task"},
                "run": {"root": str(tmp_path / "runs"), "name": "a", "steps": 7},
                "checkpoint": {"path": str(tmp_path / "ckpt"), **checkpoint},
            }
        )

    assert RunFolder.latest(recipe()) is None
    folder = RunFolder.create(recipe())
    (folder.path / "status.json").write_text("{}")
    Checkpoints(recipe().checkpoint, folder.path).save(3, LEARNER, {"run_folder": str(folder.path)})
    assert RunFolder.resumed(recipe()).path == folder.path
    (folder.path / "status.json").unlink()
    assert RunFolder.resumed(recipe()).path == tmp_path / "runs" / "a-2"
    (tmp_path / "ckpt" / "_actor" / "global_step3" / "driver.json").write_text("")
    with pytest.raises(UserError, match=r"global_step3/driver.json differs from the file .*; there is no checkpoint before it"):
        RunFolder.latest(recipe())


def test_what_needs_a_path_says_so() -> None:
    for setting in ({"save_hf": True}, {"resumable": False}):
        with pytest.raises(UserError, match=r"needs a folder in checkpoint.path"):
            CheckpointConfig(**setting)


def test_the_first_checkpoint_may_have_no_state_of_the_learner(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(0, writer({}), {"step": 0})
    step, stored, driver = kept.load()
    assert (step, stored.files, driver) == (0, {}, {"step": 0})


def test_copies_in_memory_are_made_where_two_fit_a_quarter_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter's state has 12 bytes in float32 and 14 in bfloat16; adapters are small; a number in the recipe counts anyway."""
    from rlhfless_ray.local import machine_memory

    monkeypatch.setattr(machine_memory, "host_memory_bytes", lambda: 24 * 10**9)

    def every(parameters: int, **changes: Any) -> int:
        recipe = Recipe.parse({"prompts": {"path": "p"}, "policy": {"path": "m"}, "reward": {"function": "math"}} | changes)
        return machine_memory.snapshot_every_steps(recipe, parameters)

    assert every(250_000_000) == 1 and every(250_000_001) == 0
    assert every(125_000_000, cluster={"memory_share": 0.5}) == 1 and every(125_000_001, cluster={"memory_share": 0.5}) == 0
    narrow = {"policy": {"path": "m", "dtype": "bfloat16"}, "learner": {"zero_stage": 1}}
    assert every(214_000_000, **narrow) == 1 and every(215_000_000, **narrow) == 0
    assert every(70 * 10**9, lora={"rank": 8}, **narrow) == 1
    assert every(70 * 10**9, checkpoint={"memory_every_steps": 3}) == 3 and every(10, checkpoint={"memory_every_steps": 0}) == 0


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_leaves_the_old_folder_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    """Before any of the renames. Without an exchange the old one is kept beside its place, until there is a new one."""
    path, renames = tmp_path / "model", ((os, "rename"), (os, "replace"), (module, "_exchange"))
    if not exchanges:
        monkeypatch.setattr(module, "_exchange", lambda first, second: False)
    for where, name in renames:
        swap_folder(path, writer({"weights": b"old"}))
        if not (child := os.fork()):
            setattr(where, name, lambda *paths: os._exit(3))
            swap_folder(path, writer({"weights": b"new"}))
            os._exit(0)
        os.waitpid(child, 0)
        kept = path if path.exists() or exchanges else next(tmp_path.glob(".model.old-*"))
        assert (kept / "weights").read_bytes() in (b"old", b"new")
    swap_folder(path, writer({"weights": b"newest"}))
    assert names(tmp_path) == ["model"] and (path / "weights").read_bytes() == b"newest"
