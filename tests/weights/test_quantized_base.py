"""Policies with quantised weights: which can be the base of an adapter, and how many parameters they have."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from placement.memory import header_parameters
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.model_folder import parameter_count, with_dtype
from rlhfless_ray.weights.quantized_base import check_quantized, has_4_bits
from rlhfless_ray.weights.tensor_file import save_tensors
from tests.placement.test_memory import QWEN_05B


def of_compressed_tensors(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, **weights}}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {"model_type": "qwen2", "quantization_config": section}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "learner": {"zero_stage": 1}, **sections})


def test_4_bits_below_an_adapter_are_accepted() -> None:
    config = of_compressed_tensors()
    assert has_4_bits(config)
    check_quantized(recipe(lora={"rank": 8}, policy={"dtype": "bfloat16"}), config)
    check_quantized(recipe(), {"model_type": "qwen2"})
    for group in ("x", None, {"weights": 4}, {}):  # of no known form
        config["quantization_config"]["config_groups"]["group_1"] = group
        assert not has_4_bits(config)


@pytest.mark.parametrize(
    ("config", "sections", "word"),
    [
        (of_compressed_tensors(), {"policy": {"dtype": "bfloat16"}}, "only with lora.rank=16; set that$"),
        (
            of_compressed_tensors(),
            {"lora": {"rank": 8, "publish": "merged"}},
            "only with lora.publish=adapter and policy.dtype=bfloat16; set that$",
        ),
        (
            of_compressed_tensors(),
            {
                "lora": {"rank": 8},
                "policy": {"dtype": "bfloat16"},
                "rollout": {"max_lag_steps": 1, "partial": "continue", "partial_kv": "keep"},
            },
            "only with rollout.partial_kv=recompute; set that$",
        ),
        (of_compressed_tensors(num_bits=8), {"lora": {"rank": 8}}, r"quantised \(compressed-tensors\)"),
        ({"quantization_config": {"quant_method": "gptq"}}, {"lora": {"rank": 8}}, r"quantised \(gptq\)"),
    ],
)
def test_other_settings_and_formats_are_refused(config: dict[str, Any], sections: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=f"^policy.path: its weights .*{word}"):
        check_quantized(recipe(**sections), config)


@pytest.mark.parametrize("groups", [None, [], {}, {"group_0": None}, {"group_0": {"weights": None}}])
def test_groups_that_name_no_weights_have_no_4_bits(groups: Any) -> None:
    config = of_compressed_tensors()
    assert not has_4_bits({**config, "quantization_config": {**config["quantization_config"], "config_groups": groups}})


def test_a_critic_is_not_made_from_4_bits() -> None:
    ppo = {"algorithm": {"advantage": {"estimator": "gae"}}, "lora": {"rank": 8}, "policy": {"dtype": "bfloat16"}}
    with pytest.raises(UserError, match=r"^critic\.path: a critic cannot be made from a policy whose weights have 4 bits; set it"):
        check_quantized(recipe(**ppo), of_compressed_tensors())
    check_quantized(recipe(**ppo, critic={"path": "critic"}), of_compressed_tensors())


def test_an_engine_needs_half_a_byte_for_each_weight_of_4_bits() -> None:
    config, run = of_compressed_tensors(), recipe(lora={"rank": 8}, policy={"dtype": "bfloat16"}, rollout={"kv_cache_mb": 80})
    sizes = [RunMemory.of(run, policy=({**section, **QWEN_05B}, 1_000_000_000)).least_mb()["engines"] for section in (config, {})]
    assert sizes[1] - sizes[0] == pytest.approx(1500)


def test_packed_weights_count_as_the_values_that_they_are() -> None:
    tensors = {
        "a.q_proj.weight_packed": torch.zeros(16, 8, dtype=torch.int32),
        "a.q_proj.weight_scale": torch.zeros(16, 2, dtype=torch.bfloat16),
        "embed.weight": torch.zeros(4, 64, dtype=torch.bfloat16),
    }
    content = save_tensors(tensors)
    assert parameter_count({"model.safetensors": content}) == 16 * 64 + 32 + 256
    named = [(name, list(x.shape), "I32" if x.dtype == torch.int32 else "BF16") for name, x in tensors.items()]
    assert header_parameters(named) == 16 * 64 + 32 + 256
    config = {**of_compressed_tensors(), "dtype": "bfloat16"}
    files = {"config.json": json.dumps(config).encode()}
    assert with_dtype(files, [content]) == files
    del tensors["a.q_proj.weight_packed"]
    assert json.loads(with_dtype(files, [save_tensors(tensors)])["config.json"]) == {"model_type": "qwen2", "dtype": "bfloat16"}
