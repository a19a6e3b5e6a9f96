"""Values of a config.json that no model can have are named before a run; those of other families and of own code are left alone."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.weights import check_config as check_config_module
from rlhfless_ray.weights.check_config import check_config
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tiny_model import scratch_policy
from tests.conftest import small_recipe

QWEN = {"model_type": "qwen2", "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**QWEN, "hidden_act": "banana"}, r"transformers has no activation 'banana' \(`hidden_act`\)"),
        ({"model_type": "gpt2", "activation_function": "banana"}, r"no activation 'banana' \(`activation_function`\)"),
        ({"model_type": "gemma3_text", "hidden_activation": "banana"}, r"no activation 'banana' \(`hidden_activation`\)"),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "hidden_act": "x"}}, "no activation 'x'"),
        ({**QWEN, "hidden_act": 5}, "Field 'hidden_act' expected str, got int"),
        ({**QWEN, "layer_types": ["full_attention"]}, r"`num_hidden_layers` \(2\) must be equal to the number of `layer_types` \(1\)"),
        ({**QWEN, "layer_types": ["banana", "banana"]}, "The `layer_types` entries must be in"),
        ({**QWEN, "rope_parameters": {**YARN, "rope_type": "banana"}}, "no rotary embeddings of type 'banana'"),
        ({**QWEN, "rope_scaling": {"type": "banana", "factor": 2}}, "no rotary embeddings of type 'banana'"),
        ({**QWEN, "rope_scaling": {"type": "yarn"}}, "Missing required keys in `rope_parameters` for 'rope_type'='yarn': {'factor'}"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "x"}}}, "no rotary embeddings of type 'x'"),
        ({**QWEN, "dtype": "banana"}, "torch.* has no .*'banana'"),
        ({**QWEN, "rope_theta": "big"}, "`rope_theta` must be a number, not 'big'"),
        ({**QWEN, "rope_parameters": "yarn"}, "Field 'rope_parameters' with value 'yarn'"),
        ({**QWEN, "vocab_size": 9, "pad_token_id": 9}, "`pad_token_id` 9 is not in its vocabulary of 9 tokens"),
        ({**QWEN, "text_config": {"hidden_size": 64}}, "models of its type have no `text_config`"),
        ({**QWEN, "eos_token_id": [1, "x"]}, r"Field 'eos_token_id' with value \[1, 'x'\]"),
    ],
)
def test_values_that_no_model_has_are_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^critic.path: its config.json describes no model: .*{said}.*; copy the whole model folder"):
        check_config(config, "critic.path")


@pytest.mark.parametrize(
    "config",
    [
        {
            **QWEN,
            "torch_dtype": "bfloat16",
            "hidden_act": "gelu",
            "rope_parameters": YARN,
            "eos_token_id": [1, 2],
            "layer_types": ["full_attention"] * 2,
        },
        {**QWEN, "hidden_act": "banana", "auto_map": {"AutoConfig": "mine.Config"}},
        {"model_type": "of-my-own", "hidden_act": "banana"},
        {"model_type": "mamba", "hidden_act": "silu"},
        {"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}]},
        {"model_type": "bloom"},
        {**QWEN, "vocab_size": 9, "pad_token_id": -1},
        {"model_type": "gpt2", "vocab_size": 9, "pad_token_id": 9},
    ],
)
def test_other_values_and_what_transformers_does_not_know_are_left_alone(config: dict[str, Any]) -> None:
    check_config(config, "policy.path")


def test_a_config_that_names_no_family_is_named() -> None:
    for config in ({}, {"hidden_size": 64}, {"model_type": ""}):
        with pytest.raises(UserError, match=r"^policy.path: its config.json names no model_type, so nothing can load it"):
            check_config(config, "policy.path")


def test_errors_of_other_causes_are_no_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise error

    for name, error in (("as_folder", OSError(errno.ENOSPC, "No space left on device")), ("_unknown_part", KeyError("ours"))):
        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(check_config_module, name, fail)
            check_config(QWEN, "policy.path")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((b'"silu"', b'"banana"'), "policy.path: its config.json describes no model: transformers has no activation"),
        ((b'"silu"', b'"gelu"'), "policy.path: engines cannot run a policy of the type `qwen2`: vLLM has only the activation silu"),
        ((b'"full_attention"', b'"banana"'), "policy.path: its config.json describes no model: .*`layer_types` entries"),
        ((b'"eos_token_id": 1', b'"eos_token_id": "x"'), "policy.path: its config.json describes no model: .*'eos_token_id'"),
    ],
)
def test_a_run_says_so_before_ray(tmp_path: Path, change: tuple[bytes, bytes], said: str) -> None:
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    assert change[0] in files["config.json"]
    files["config.json"] = bytes(files["config.json"]).replace(*change)
    tree = small_recipe(tmp_path, policy__path=str(write_folder(tmp_path / "policy", files)))
    with pytest.raises(UserError, match=f"^{said}"):
        Runtime(Recipe.parse(tree))
