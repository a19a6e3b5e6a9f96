"""Runs with `run.exact` end with the same bits whatever slots the planner gives the update, also if they stop and resume."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from placement.scaling.resize_policy import Hold
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.autoscaler import autoscaler
from tests.conftest import small_recipe
from tests.run_files import rows

sys.path.insert(0, str(Path(__file__).parent / "rollout"))  # families

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]


def layer_norm_policy(folder: Path) -> Path:
    """A model folder with the tokenizer of the task."""
    from families import policy

    from rlhfless_ray.weights.load_policy import initial_policy
    from rlhfless_ray.weights.model_folder import write_folder

    files = initial_policy(Recipe.parse(small_recipe(folder)))[0]
    config = json.loads(files["config.json"])
    ends = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    return write_folder(folder / "policy", {**files, **policy("gpt_neox", **ends)})


def trained(
    folder: Path, slots: Iterable[int], monkeypatch: pytest.MonkeyPatch, *, stops_after: int | None = None, exact: bool = True
) -> Path:
    """A run whose update gets so many slots in each step, as if the planner had chosen them. Its layers normalise with weight and bias,
    whose gradients torch adds up in as many parts as there are threads."""
    folder.mkdir()
    counts = iter(slots)
    monkeypatch.setattr(autoscaler.Autoscaler, "size_learner", lambda *_: Hold(next(counts), "as the test says"))
    recipe = Recipe.parse(
        small_recipe(
            folder, run__exact=exact, policy__path=str(layer_norm_policy(folder)), learner__max_slots_per_rank=2, checkpoint__every_steps=1
        )
    )
    with Runtime(recipe) as run:
        list(run if stops_after is None else itertools.islice(run, stops_after))
    if stops_after is not None:
        with Runtime(recipe, resume=True) as run:
            list(run)
    return folder / "runs" / "small"


def test_one_slot_two_slots_changing_slots_and_a_resume_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (trained(tmp_path / str(count), itertools.repeat(count), monkeypatch) for count in (1, 2))
    changing = trained(tmp_path / "changing", (2, 1, 1, 2), monkeypatch, stops_after=2)
    held = [[row["pool/learn_slots"] for row in rows(run, 1)] for run in (one, two, changing)]
    assert set(held[0]) == {1} and held[1][0] == 2 and set(held[2]) == {1, 2}, "the runs differ in their slots"
    wanted = load_file(one / "model" / "model.safetensors")
    start = load_file(tmp_path / "1" / "policy" / "model.safetensors")
    assert not np.array_equal(wanted["embed_out.weight"], start["embed_out.weight"]), "nothing was learned"
    for run in (two, changing):
        found = load_file(run / "model" / "model.safetensors")
        assert [name for name in wanted if not np.array_equal(wanted[name], found[name])] == []
        assert [row["learn/grad_norm"] for row in rows(run, 1)] == [row["learn/grad_norm"] for row in rows(one, 1)]
