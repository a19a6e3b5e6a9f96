"""Policies that engines compute differently are refused before a run; configurations as transformers writes them."""

from __future__ import annotations

import pytest
from transformers import Cohere2Config, Ernie4_5Config, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig, StableLmConfig

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.known_differences import check_differences, check_engines, find_difference, find_obstacle

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
PHI3 = Phi3Config(max_position_embeddings=131_072, original_max_position_embeddings=4096, rope_parameters=LONGROPE).to_dict()


@pytest.mark.parametrize(
    ("config", "tokens", "word"),
    [
        (Qwen3Config(attention_bias=True).to_dict(), 64, "attention_bias"),
        (Qwen3MoeConfig(attention_bias=True).to_dict(), 64, "attention_bias"),
        (Ernie4_5Config(use_bias=True).to_dict(), 64, "use_bias"),
        (Cohere2Config(sliding_window=256).to_dict(), 257, "window is 257 tokens"),
        ({"model_type": "deepseek_v3"}, 64, "0.04 nats"),
        ({"model_type": "cohere2_moe"}, 64, "0.04 nats"),
        ({"model_type": "cohere2"}, 4097, "window is 4097 tokens"),
        (PHI3, 4097, "beyond 4096 tokens"),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 5000, "beyond 4096 tokens"),
    ],
)
def test_a_policy_that_engines_compute_differently_is_named(config: dict, tokens: int, word: str) -> None:
    assert word in (find_difference(config, tokens) or "")


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (Qwen3Config().to_dict(), 64),
        (LlamaConfig(attention_bias=True).to_dict(), 64),
        (Cohere2Config(sliding_window=256).to_dict(), 256),
        (PHI3, 4096),
    ],
)
def test_others_and_short_sequences_are_not(config: dict, tokens: int) -> None:
    assert find_difference(config, tokens) is None


@pytest.mark.parametrize(
    ("config", "of_cpu", "word"),
    [
        ({"model_type": "laguna"}, False, "routers' biases"),
        (StableLmConfig(use_parallel_residual=True).to_dict(), False, "other norms than transformers' with use_parallel_residual"),
        (StableLmConfig(qk_layernorm=True).to_dict(), False, "qk_layernorm"),
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=3).to_dict(), False, "in some of them"),
        ({"model_type": "qwen3_5_moe_text"}, False, "torchvision"),
        ({"model_type": "dbrx"}, False, "cannot load new weights"),
        ({"model_type": "gpt_oss"}, True, "on CPU"),
        ({"model_type": "lfm2_moe"}, True, "on CPU"),
        ({"model_type": "qwen3_next"}, True, "set policy.dtype"),
        (LlamaConfig(hidden_act="gelu").to_dict(), False, "only the activation silu for it, and config.json names gelu"),
        ({"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 4}, True, "has no attention for heads of 8 values"),
        ({"model_type": "llava", "text_config": {"model_type": "minimax_m2"}}, False, "cannot load new weights"),
        *(
            ({"model_type": kind, "architectures": [name]}, False, f"vLLM has no model {name}")
            for kind, name in (
                ("gpt_neo", "GPTNeoForCausalLM"),
                ("mpt", "MptForCausalLM"),
                ("codegen", "CodeGenForCausalLM"),
                ("qwen2", "BananaForCausalLM"),
            )
        ),
    ],
)
def test_a_policy_that_no_engine_can_run_is_refused(monkeypatch: pytest.MonkeyPatch, config: dict, of_cpu: bool, word: str) -> None:
    monkeypatch.setattr("rlhfless_ray.weights.known_differences.find_spec", lambda name: None)
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
    for resource in ("cpu",) if of_cpu else ("cpu", "gpu", ""):
        with pytest.raises(UserError, match=f"^policy.path: engines cannot run a policy of the type `.*{word}"):
            check_engines(recipe, config, resource)
    if of_cpu:
        check_engines(recipe, config, "gpu")
        check_engines(recipe, config, "")


def test_others_of_their_families_can_be_run() -> None:
    for config in (StableLmConfig(), Qwen2Config(), Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0)):
        assert find_obstacle(config.to_dict(), "float32", True) is None
    assert find_obstacle({"model_type": "qwen3_next"}, "bfloat16", True) is None


def test_the_run_is_refused_in_one_sentence_unless_it_only_warns() -> None:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "rollout": {"max_tokens": 4096}}
    with pytest.raises(UserError, match=r"policy.path: engines would sample from another policy .4100 tokens at most.: of its") as error:
        check_differences(Recipe.parse(tree), PHI3, 4)
    assert "\n" not in str(error.value)
    check_differences(Recipe.parse({**tree, "rollout": {"max_tokens": 4096, "agreement": "warn"}}), PHI3, 4)
    check_differences(Recipe.parse({**tree, "rollout": {"max_tokens": 4000}}), PHI3, 4)
