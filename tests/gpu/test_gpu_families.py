"""Engine and learner agree on the device, under weights that the learner has updated there."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless_ray.learn.model_checks import WITH_ROUTERS
from tests.gpu.lanes import BFLOAT16, FLOAT32, check_family
from tests.rollout.families import ALWAYS

pytestmark = pytest.mark.gpu

CASES = [*((family, "float32") for family in ALWAYS), ("llama", "bfloat16"), ("qwen3_moe", "bfloat16")]


def begin(hosts: Any, items: list[Any]) -> None:
    """Begin the checks of all selected families."""
    for item in items:
        family, dtype = (item.callspec.params[name] for name in ("family", "dtype"))
        hosts.lanes.begin((family, dtype), check_family, f"{family} {dtype}", family, dtype)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_engine_and_learner_agree(hosts: Any, family: str, dtype: str) -> None:
    found = hosts.lanes.result((family, dtype))
    assert found["applied"] == 1 and found["changed"] and found["differing"] == ([], [])
    if dtype == "bfloat16":
        assert max(found["mean"]) < BFLOAT16
        return
    assert max(found["largest"]) < FLOAT32 and found["mismatch_max"] < FLOAT32
    if family in WITH_ROUTERS:
        assert found["all_told"] and max(found["own_experts"], found["replayed_experts"]) < FLOAT32 < 1e-2 < found["other_experts"]
