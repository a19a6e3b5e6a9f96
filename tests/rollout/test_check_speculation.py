"""What is refused before a run: policies that cannot verify drafts, and drafters that mean other tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.task_tokenizer import TaskTokenizer
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.speculation import check_speculation, read_drafter
from rlhfless_ray.weights.model_folder import write_folder
from tests.conftest import small_recipe


def recipe(tmp_path: Path, **rollout: Any) -> Recipe:
    return Recipe.parse(small_recipe(tmp_path, **{f"rollout__{key}": value for key, value in rollout.items()}))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "qwen2"}, None),
        ({"model_type": "jamba", "layers_block_type": ["mamba", "attention"]}, "some of its layers are of kind mamba"),
        ({"model_type": "mamba", "state_size": 16}, "it keeps a recurrent state"),
        ({"model_type": "mistral", "sliding_window": 4096}, "its layers have a sliding window of 4096 tokens"),
    ],
)
def test_policies_that_cannot_verify_drafts_are_rejected_or_run_without(tmp_path: Path, config: dict[str, Any], why: str | None) -> None:
    files = {"config.json": json.dumps(config).encode()}
    assert check_speculation(recipe(tmp_path), files) == (recipe(tmp_path), None), "nothing is asked for"
    on, auto = recipe(tmp_path, speculation="on"), recipe(tmp_path, speculation="auto")
    if why is None:
        assert check_speculation(on, files) == (on, None)
        return
    with pytest.raises(UserError, match=f"rollout.speculation: .*{why}"):
        check_speculation(on, files)
    without, note = check_speculation(auto, files)
    assert without.rollout.speculation == "off" and why in (note or "")


def test_without_the_package_for_drafts_auto_means_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_ray.rollout.speculation.find_spec", lambda name: None)
    files = {"config.json": json.dumps({"model_type": "qwen2"}).encode()}
    with pytest.raises(UserError, match=r"rollout.speculation: .* not installed; run pip install 'rlhfless-ray\[drafts\]'"):
        check_speculation(recipe(tmp_path, speculation="on"), files)
    without, note = check_speculation(recipe(tmp_path, speculation="auto"), files)
    assert without.rollout.speculation == "off" and "arctic-inference is not installed" in (note or "")


def test_a_drafter_needs_speculation(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.drafter: rollout.speculation is off"):
        recipe(tmp_path, drafter="some/folder")
    with pytest.raises(UserError, match=r"rollout.drafter_train: rollout.speculation is off"):
        recipe(tmp_path, drafter_train="on")
    for other in ({"functions__elastic": False}, {"rollout__max_lag_steps": 1}):
        with pytest.raises(UserError, match=r"rollout.drafter_train: .*(elastic|max_lag_steps)"):
            Recipe.parse(small_recipe(tmp_path, rollout__speculation="auto", rollout__drafter_train="on", **other))


@pytest.mark.slow
def test_a_drafter_must_have_the_tokens_of_the_policy(tmp_path: Path) -> None:
    from rlhfless_ray.weights.tiny_model import scratch_policy

    policy, of_policy = TaskTokenizer(task("chain")), scratch_policy(recipe(tmp_path), task("chain"))

    def read(name: str, files: dict[str, bytes]) -> Any:
        write_folder(tmp_path / name, files)
        return read_drafter(recipe(tmp_path, speculation="auto", drafter=str(tmp_path / name)), policy, of_policy)

    assert read_drafter(recipe(tmp_path), policy, of_policy) is None
    files = of_policy
    assert read("same", files).keys() == files.keys()
    for name, changed, why in (
        ("words", scratch_policy(recipe(tmp_path), task("sort")), "its tokenizer has other tokens"),
        ("weights", {name: part for name, part in files.items() if not name.endswith(".safetensors")}, "safetensors"),
        ("small", {**files, "config.json": _with(files, vocab_size=3)}, "its vocab_size 3 does not cover"),
        ("wide", {**files, "config.json": _with(files, intermediate_size=7)}, "its weights do not fit its config.json"),
        ("window", {**files, "config.json": _with(files, layer_types=["mamba"])}, "full attention"),
    ):
        with pytest.raises(UserError, match=f"^rollout.drafter: .*{why}"):
            read(name, changed)
    with pytest.raises(UserError, match=r"rollout\.drafter"):
        read_drafter(recipe(tmp_path, speculation="on", drafter=str(tmp_path / "nowhere")), policy, of_policy)


def _with(files: dict[str, bytes], **changes: Any) -> bytes:
    return json.dumps({**json.loads(files["config.json"]), **changes}).encode()
