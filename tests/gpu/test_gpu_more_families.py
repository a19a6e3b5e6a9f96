"""Families that `make test-long` checks on CPU, and those that vLLM cannot compute there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.lanes import BFLOAT16, FLOAT32, check_family
from tests.gpu.other_families import OTHERS, other_policy
from tests.rollout.families import ALWAYS, DENSE, ORDER

pytestmark = pytest.mark.gpu

MORE = [family for family in (*ORDER, *DENSE) if family not in ALWAYS]
CASES = [*((family, dtype) for family in OTHERS for dtype in ("float32", "bfloat16")), *((family, "float32") for family in MORE)]


def begin(hosts: Any, items: list[Any]) -> None:
    for item in items:
        family, dtype = (item.callspec.params[name] for name in ("family", "dtype"))
        hosts.lanes.begin((family, dtype), check, family, dtype)


def check(engines: Any, learners: Any, family: str, dtype: str) -> dict[str, Any]:
    files = other_policy(family, dtype) if family in OTHERS else None
    return check_family(engines, learners, f"{family} {dtype}", family, dtype, files)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_engine_and_learner_agree(hosts: Any, family: str, dtype: str) -> None:
    found = hosts.lanes.result((family, dtype))
    assert found["applied"] == 1 and found["changed"] and found["differing"] == ([], [])
    assert max(found["mean"]) < BFLOAT16 if dtype == "bfloat16" else max(found["largest"]) < FLOAT32
