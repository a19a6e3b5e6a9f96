"""On a real device: a parked learner leaves next to nothing there, and goes on as if it had stayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learn.conftest import learner_settings, run_gangs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parked_learner_gives_its_device_back_and_goes_on(tmp_path: Path, stage: int, hosted: bool) -> None:
    if hosted and not stage:
        pytest.skip("DeepSpeed offloads the optimizer of shards only")
    from tiny_policy import random_batch, tiny_policy

    rng = np.random.default_rng(7)
    settings = learner_settings(1, stage, algorithm={"kl": {"coefficient": 0.3, "estimator": "k3"}}, learner={"optimizer_offload": hosted})
    case = {"settings": settings, "files": tiny_policy(width=512), "batches": [random_batch(rng) for _ in range(3)], "device": "gpu"}
    [results] = run_gangs(tmp_path / "gang", {1: {"stays": case, "parks": {**case, "parks": True, "snapshots": (2,)}}})[1]
    stays, parks = results["stays"], results["parks"]
    assert "error" not in stays and "error" not in parks, (stays.get("error"), parks.get("error"))
    for one, other in zip(stays["weights"], parks["weights"], strict=True):
        assert all(np.allclose(one[name], other[name], atol=1e-6) for name in one)
    assert parks["snapshots"]["2 away"] == parks["snapshots"][2]
    for at_work, away in parks["memory"]:
        assert away < 0.1 * at_work, f"{away} of {at_work} bytes stay on the device"
