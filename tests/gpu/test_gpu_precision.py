"""Engines with 8-bit weights, with adapters on their base and with a base in 4 bits, against the learner on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhfless_ray.runtime.agreement import tolerance
from tests.gpu.hosts import ON
from tests.gpu.lanes import check_family
from tests.rollout.families import pack_4_bits, policy

pytestmark = pytest.mark.gpu

LORA = {"rank": 3, "alpha": 7, "publish": "adapter"}  # vLLM has no such rank: it makes room for 8
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}  # what kernels of 4 bits take without padding
CASES: dict[str, dict[str, Any]] = {
    "int8": {"family": "llama", "quantization": "int8"},
    "fp8": {"family": "llama", "quantization": "fp8"},
    "adapter": {"family": "llama", "lora": LORA},
    "fused adapter": {"family": "phi3", "lora": LORA},
    "int8 experts": {"family": "qwen3_moe", "quantization": "int8"},
    "fp8 experts": {"family": "qwen3_moe", "quantization": "fp8"},
    "adapter on int8": {"family": "llama", "lora": LORA, "quantization": "int8"},
    "4 bits": {"family": "qwen2", "lora": LORA},
    "graphs": {"family": "llama", "lora": LORA, "eager": False},
    "graphs int8": {"family": "qwen2", "quantization": "int8", "eager": False},
}


def begin(hosts: Any, items: list[Any]) -> None:
    """Each engine can be parked, so each has a process."""
    for item in items:
        hosts.get("EngineTools", item.callspec.params["name"])
    hosts.get("LearnerTools", "precision")


@pytest.mark.parametrize("name", CASES)
def test_engine_and_learner_agree(hosts: Any, record: Callable[..., None], name: str) -> None:
    case = dict(CASES[name])
    family, quantization = case.pop("family"), case.get("quantization", "off")
    if quantization == "fp8" and ON == "cpu":
        pytest.skip("vLLM on CPU cannot quantise weights to fp8 when it loads them")
    files = pack_4_bits(policy(family, 1, "bfloat16", 2, **WIDE)) if name == "4 bits" else None
    engines, learners = hosts.get("EngineTools", name), hosts.get("LearnerTools", "precision")
    found = check_family(engines, learners, name, family, "bfloat16", files, parks=True, **case)
    record(**found)
    assert found["applied"] == 1 and found["changed"]
    assert max(found["mean"]) < tolerance("bfloat16", quantization)
    assert found["after_parking"]["equal"] == found["after_parking"]["responses"]
