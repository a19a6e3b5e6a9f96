"""Whole runs whose engines get one tensor wrong: they end before they learn from it, with its name; or warn, if the recipe says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.runtime.worker_pools import ActorClasses
from rlhfless_ray.weights.tensor_slice import Slices
from tests.conftest import small_recipe
from tests.run_files import rows

pytestmark = [pytest.mark.ray, pytest.mark.engine]

GARBLED = "model.layers.1.self_attn.v_proj.weight"


def spoiled(weights: Mapping[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    return {name: array[::-1].copy() if str(name) == GARBLED else array for name, array in weights.items()}


def garbling_runtime(recipe: Recipe, where: str) -> Runtime:
    """`where` version 1 goes wrong: on its `way` to the engines, or `inside` of them, after it was checked."""
    import ray.cloudpickle

    from rlhfless_ray.engine.exact_actor import ExactEngineActor

    class Garbling(ExactEngineActor):
        def open(self, threads: int) -> Any:
            opened = super().open(threads)
            if where == "inside":
                replace_weights = self.engine._replace_weights
                self.engine._replace_weights = lambda version, weights: replace_weights(
                    version, spoiled(weights) if version == 1 else weights
                )
            return opened

        def load(self, version: int, weights: Slices, expected: Any) -> Any:
            return super().load(version, spoiled(weights) if (version, where) == (1, "way") else weights, expected)

    class Run(Runtime):
        def actor_classes(self) -> ActorClasses:
            return replace(super().actor_classes(), rollout=Garbling)

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return Run(recipe)


@pytest.mark.parametrize("where", ["way", "inside"])
def test_a_run_whose_engines_get_a_tensor_wrong_ends_with_its_name(private_ray: None, tmp_path: Path, where: str) -> None:
    run = garbling_runtime(Recipe.parse(small_recipe(tmp_path, run__steps=3, evaluate__prompts=0)), where)
    said = f"version 1 arrived damaged: {GARBLED} differ" if where == "way" else f"as they were published: {GARBLED}$"
    with pytest.raises(RunError, match=said), run:
        for _ in run:
            pass
    assert [row["step"] for row in rows(run.folder.path) if "learn/loss" in row] == [1], "nothing was learned from the wrong policy"
    status = json.loads((run.folder.path / "status.json").read_text())
    assert status["status"] == "failed" and GARBLED in status["reason"]
    assert GARBLED in (run.folder.path / "report.html").read_text()


def test_a_run_that_is_to_go_on_warns(private_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the step whose engines were wrong: in the progress line, the metrics and the report."""
    run = garbling_runtime(Recipe.parse(small_recipe(tmp_path, run__steps=3, rollout__agreement="warn")), "inside")
    with run:
        for _ in run:
            pass
    told = rows(run.folder.path, 1)
    assert [row["learn/mismatch_warning"] for row in told] == [0, 1, 0]
    assert told[1]["learn/mismatch_mean"] > told[1]["learn/mismatch_tolerance"] == 1e-3
    lines = capsys.readouterr().out.splitlines()
    assert [("mismatch of engine and learner" in line) for line in lines if line.startswith("step ") and "/3" in line] == [
        False,
        False,
        True,
        False,
    ]
    assert any("do not agree under weight version 1" in line for line in lines)
    assert "Engines and learner disagree" in (run.folder.path / "report.html").read_text()
