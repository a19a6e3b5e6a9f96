"""A supervised stage whose models do not fit the memory is refused before it starts, with what may help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.compat.openrlhf.memory import too_large
from rlhfless_ray.compat.openrlhf.supervised import translate_supervised
from rlhfless_ray.preflight import memory_check
from rlhfless_ray.preflight.memory_check import DoesNotFit, check
from rlhfless_ray.preflight.memory_fit import fit
from rlhfless_ray.preflight.memory_needs import Room
from rlhfless_ray.preflight.stage_memory import StageMemory
from rlhfless_ray.recipe.learn_sections import even_ranks
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.examples import Example, Examples
from tests.placement.test_memory import LLAMA_70B, QWEN_05B, QWEN_7B

GB = 10**9
H100, MACHINE = Room("gpu", 8, 85 * GB, 85 * GB), Room("cpu", 8, 64 * GB, 64 * GB, has_driver=True)


def test_ranks_that_share_copies_come_in_even_numbers() -> None:
    """Of 7 ranks where 8 should share a copy, 4 do; 7 would have the whole model each."""
    assert [even_ranks(count, 8) for count in (0, 1, 3, 7, 8, 15, 16)] == [0, 1, 2, 4, 8, 8, 16]
    assert [even_ranks(count, 1) for count in range(5)] == [0, 1, 2, 3, 4]


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def refusal(path: Path, room: Room, task: str = "sft", **sections: Any) -> str:
    recipe = SupervisedRecipe.parse({"task": task, "policy": {"path": str(path)}, "data": {"path": "x"}, **sections})
    try:
        assert check(StageMemory.of(recipe), lambda: room) == ""
    except DoesNotFit as error:
        return str(error)
    return ""


def test_ranks_that_no_gpu_holds_are_refused_with_what_may_help(tmp_path: Path) -> None:
    seven = folder(tmp_path / "7b", QWEN_7B)
    said = refusal(seven, H100)
    assert said.startswith("policy.path: a rank needs at least") and "a GPU here has 85.0 GB" in said
    assert said.endswith("it may fit with learner.ranks=8 and learner.zero_stage=3")
    assert not refusal(seven, H100, learner={"ranks": 8, "zero_stage": 3}) and not refusal(seven, H100, lora={"rank": 8})
    assert "no setting makes it fit" in refusal(folder(tmp_path / "70b", {**LLAMA_70B, "num_hidden_layers": 400}), H100)


def test_ranks_on_cores_share_the_memory_of_their_machine(tmp_path: Path) -> None:
    seven = folder(tmp_path / "7b", QWEN_7B)
    said = refusal(seven, MACHINE, policy={"path": str(seven), "dtype": "bfloat16"}, learner={"ranks": 2, "zero_stage": 1})
    assert "the stage with its 2 ranks needs at least" in said and "this machine has 64.0 GB" in said and "lora.rank=16" in said
    lora: dict[str, Any] = {"policy": {"path": str(seven), "dtype": "bfloat16"}, "learner": {"zero_stage": 1}, "lora": {"rank": 8}}
    assert not refusal(seven, MACHINE, **lora)
    big = folder(tmp_path / "teacher", {**QWEN_7B, "num_hidden_layers": 120})
    assert "teacher" in refusal(seven, MACHINE, "kd", teacher={"path": str(big)}, **lora)


def test_memory_that_is_not_known_is_said(tmp_path: Path) -> None:
    recipe = SupervisedRecipe.parse({"task": "sft", "policy": {"path": str(folder(tmp_path / "m", QWEN_7B))}, "data": {"path": "x"}})
    assert "the memory of a GPU is not known here; the run needs at least: a rank" in check(
        StageMemory.of(recipe), lambda: Room("gpu", 1, None)
    )
    small = SupervisedRecipe.parse({"task": "sft", "data": {"task": "chain"}})
    assert check(StageMemory.of(small), lambda: pytest.fail("it asks")) == ""


def test_explain_names_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(memory_check, "visible_gpus", lambda: 1)
    monkeypatch.setattr(memory_check, "memory_bytes", lambda gpu: 85 * GB)
    line = ["--pretrain", str(folder(tmp_path / "m", LLAMA_70B)), "--dataset", "d", "--bf16", "--ds_tensor_parallel_size", "4"]
    said = too_large(translate_supervised("train_dpo", line, {}))
    assert said is not None and said.startswith("--pretrain: policy.path: a rank needs at least 141.1 GB")
    assert too_large(translate_supervised("train_dpo", line, {}), {"RAY_ADDRESS": "head:6379"}) is None


def test_the_longest_row_counts(tmp_path: Path) -> None:
    seven = folder(tmp_path / "7b", QWEN_7B)
    tree = {"policy": {"path": str(seven), "dtype": "bfloat16"}, "learner": {"zero_stage": 1}, "lora": {"rank": 8}}
    recipe = SupervisedRecipe.parse({"task": "sft", "data": {"path": "x"}, **tree})
    assert check(StageMemory.of(recipe, 200_000), lambda: H100) == ""
    with pytest.raises(DoesNotFit, match=r"it may fit with learner\.ranks=8 and learner\.sequence_parallel=4") as refused:
        check(StageMemory.of(recipe, 1_000_000), lambda: H100)
    assert "200.7 GB activations of a row of 1000000 tokens" in str(refused.value)
    assert check(StageMemory.of(recipe.with_settings({"learner.ranks": 8, "learner.sequence_parallel": 4}), 1_000_000), lambda: H100) == ""
    with pytest.raises(DoesNotFit, match="no setting makes it fit: take shorter rows"):
        check(StageMemory.of(recipe, 10_000_000), lambda: H100)


def test_automatic_settings_follow_the_longest_row(tmp_path: Path) -> None:
    seven = folder(tmp_path / "7b", QWEN_7B)
    tree = {"policy": {"path": str(seven), "dtype": "bfloat16"}, "learner": {"zero_stage": 1}, "lora": {"rank": 8}}
    recipe = SupervisedRecipe.parse({"task": "sft", "data": {"path": "x"}, **tree})
    found = {}
    for tokens in (200, 4_000, 60_000, 400_000):
        found[tokens] = fit(StageMemory.of(recipe, tokens), lambda: H100)
        learner = found[tokens].job.recipe.learner
        assert "auto" not in (learner.gradient_checkpointing, learner.optimizer_offload)
        assert learner.micro_batch_tokens != 8192, "it stays `auto`, so that the ranks know that the user has not named it"
        assert learner.recomputes_activations == (tokens > 4_000) and recipe.learner.gradient_checkpointing == "auto"
    reason = found[200].reason
    assert reason.startswith("learner.micro_batch_tokens=") and "with the defaults a rank would take about" in reason
    assert not found[200].note and found[400_000].note.startswith("the memory may not be enough: policy.path: a rank needs about")
    on_cores = recipe.with_settings({"lora.rank": 0, "policy.path": str(folder(tmp_path / "05b", QWEN_05B))})

    def tokens_with(share: float, gigabytes: int) -> int:
        room = Room("cpu", 2, gigabytes * 10**9, gigabytes * 10**9)
        part = on_cores.with_settings({"cluster.memory_share": share})
        return fit(StageMemory.of(part, 4_000), lambda: room).job.recipe.learner.max_micro_batch_tokens

    assert tokens_with(0.5, 48) == tokens_with(1.0, 24) < tokens_with(1.0, 48)
    fixed = recipe.with_settings({"learner.micro_batch_tokens": 8192, "learner.gradient_checkpointing": False})
    unchanged = fit(StageMemory.of(fixed, 4_000), lambda: H100)
    assert unchanged.job.recipe == fixed and not unchanged.reason


def test_the_longest_row_has_a_prompt_once() -> None:
    pair = [[Example([1] * 9, 5), Example([1] * 11, 5)], [Example([1] * 12, 2), Example([1] * 3, 2)]]
    assert Examples.of(pair, [0, 0]).longest_row() == 15 and Examples.of(pair, [0, 0]).longest_row(together=False) == 12
    assert Examples.of([[Example([1] * 9, 5)]], [0]).longest_row() == 9
