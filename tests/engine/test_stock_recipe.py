"""What a recipe may ask of stock engines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.engine.exact_actor import ExactEngineActor
from rlhfless_ray.engine.stock_actor import StockEngineActor
from rlhfless_ray.preflight.check_policy import check_policy
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.worker_pools import ActorClasses, with_publish

BASE: dict[str, Any] = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}


def recipe_with(settings: dict[str, Any]) -> Recipe:
    tree: dict[str, Any] = {name: dict(section) for name, section in BASE.items()}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return Recipe.parse(tree)


@pytest.mark.parametrize(
    ("key", "value", "shown", "instead"),
    [
        ("rollout.speculation", "on", "on", "auto or off"),
        ("rollout.prefix_kv", "on", "on", "auto"),
        ("rollout.quantization", "int8", "int8", "off"),
        ("run.exact", True, "true", "false"),
        ("algorithm.loss.router_replay", True, "true", "false"),
        ("lora.publish", "adapter", "adapter", "merged"),
        ("rollout.partial_kv", "keep", "keep", "recompute"),
    ],
)
def test_what_only_the_exact_engine_has_is_refused(key: str, value: Any, shown: str, instead: str) -> None:
    needed = {
        "lora.publish": {"lora.rank": 4},
        "rollout.partial_kv": {"rollout.partial": "continue", "rollout.max_lag_steps": 1},
        "algorithm.loss.router_replay": {"rollout.prefix_kv": "off"},
    }.get(key, {})
    asked = {**needed, key: value}
    assert recipe_with(asked).rollout.engine == "exact"
    with pytest.raises(UserError, match=rf"{key}: {shown} needs .*rollout.engine=stock does not have; set it to {instead}, or"):
        recipe_with({**asked, "rollout.engine": "stock"})


def test_the_recipe_chooses_the_engines() -> None:
    recipe = Recipe.parse({**BASE, "rollout": {"engine": "stock"}})
    assert recipe.rollout.prefix_kv == "auto", "it means without, where engines share no pages"
    stock, exact = ActorClasses.real("stock"), ActorClasses.real()
    assert (stock.rollout, stock.prefill) == (StockEngineActor, None)
    assert (exact.rollout, exact.prefill) == (ExactEngineActor, ExactEngineActor)
    with pytest.raises(UserError, match=r"rollout\.engine"):
        Recipe.parse({**BASE, "rollout": {"engine": "other"}})


def test_a_base_of_4_bits_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_ray.preflight.check_policy.has_4_bits", lambda config: True)
    monkeypatch.setattr("rlhfless_ray.preflight.check_policy.check_quantized", lambda recipe, config: None)
    recipe = Recipe.parse({**BASE, "rollout": {"engine": "stock"}, "lora": {"rank": 4}})
    with pytest.raises(UserError, match="its weights have 4 bits, and stock engines hold merged weights only"):
        check_policy(recipe, {"model_type": "qwen2", "num_attention_heads": 4, "num_hidden_layers": 2})


def test_a_base_of_4_bits_is_refused_where_vllm_has_no_product_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    files = {"config.json": json.dumps({"model_type": "qwen2", "quantization_config": packed}).encode()}
    recipe = Recipe.parse({**BASE, "lora": {"rank": 4}, "policy": {"dtype": "bfloat16"}, "learner": {"zero_stage": 1}})
    monkeypatch.setattr("rlhfless_ray.runtime.worker_pools.has_int4", lambda: False)
    with pytest.raises(UserError, match=r"policy\.path: its weights have 4 bits, for which vLLM needs AVX-512 on CPU"):
        with_publish(recipe, files, "cpu")
    assert with_publish(recipe, files, "gpu").lora.publish == "adapter"
    monkeypatch.setattr("rlhfless_ray.runtime.worker_pools.has_int4", lambda: True)
    assert with_publish(recipe, files, "cpu").lora.publish == "adapter"
