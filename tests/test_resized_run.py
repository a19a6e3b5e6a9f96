"""A run whose learner changes its layout three times ends where a run with one rank ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from placement.scaling.resize_policy import Decision, Hold
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.autoscaler.learner_sizing import LearnerSizing
from rlhfless_ray.learn.rank_settings import RankLayout
from rlhfless_ray.runtime import runtime
from tests.conftest import small_recipe

LAYOUTS = {1: RankLayout(), 2: RankLayout(2, 1, 2)}  # by ranks: two share each matrix, at another ZeRO stage
RANKS_AFTER = {1: 2, 2: 1, 3: 2}  # step → ranks of the next update


def forced(self: LearnerSizing, step: int, room: int) -> Decision:
    return Hold(RANKS_AFTER.get(step, self.predictor.ranks), "forced by the test")


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.learner
@pytest.mark.usefixtures("no_ray")
def test_changes_of_ranks_between_steps_leave_the_weights_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LearnerSizing, "decide_ranks", forced)
    weights, rows = {}, {}
    for name, settings in (
        ("auto", {"learner__ranks": "auto", "learner__zero_stage": "auto", "learner__tensor_parallel": "auto"}),
        ("fixed", {}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        layouts = LAYOUTS if name == "auto" else {1: LAYOUTS[1]}
        monkeypatch.setattr(runtime, "rank_layouts", lambda *_, layouts=layouts: layouts)
        with Runtime(Recipe.parse(small_recipe(folder, run__steps=5, **settings))) as run:
            rows[name] = [step.metrics for step in run]
        weights[name] = {
            key: value.astype(np.float32)
            for path in (run.folder.path / "model").glob("*.safetensors")
            for key, value in load_file(path).items()
        }
    assert [row.get("learn/ranks") for row in rows["auto"]] == [2, 1, 2, 2, 2]
    moved: list[Any] = [row["learn/reshard_mb"] for row in rows["auto"] if "learn/reshard_mb" in row]
    least = [row["learn/reshard_bound_mb"] for row in rows["auto"] if "learn/reshard_mb" in row]
    assert len(moved) == 3 and moved == pytest.approx(least, rel=1e-3), "but for the padding of ZeRO's parts"
    assert not any(row["faults/learner_restarts"] for row in rows["auto"])
    assert max(float(np.abs(weights["auto"][key] - weights["fixed"][key]).max()) for key in weights["fixed"]) < 1e-5
