"""Policies that engines compute differently are refused before a run; configurations as transformers writes them."""

from __future__ import annotations

import pytest
from transformers import Cohere2Config, Ernie4_5Config, LlamaConfig, Phi3Config, Qwen3Config, Qwen3MoeConfig

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.known_differences import check_differences, find_difference

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


def test_the_run_is_refused_in_one_sentence_unless_it_only_warns() -> None:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "rollout": {"max_tokens": 4096}}
    with pytest.raises(UserError, match=r"policy.path: engines would sample from another policy .4100 tokens at most.: of its") as error:
        check_differences(Recipe.parse(tree), PHI3, 4)
    assert "\n" not in str(error.value)
    check_differences(Recipe.parse({**tree, "rollout": {"max_tokens": 4096, "agreement": "warn"}}), PHI3, 4)
    check_differences(Recipe.parse({**tree, "rollout": {"max_tokens": 4000}}), PHI3, 4)
