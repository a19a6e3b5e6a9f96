"""Models that vLLM (0.32) cannot run, or computes differently than transformers, by their config.json. Imports no library of models.

Each case was tried with a small random policy in float32. `runtime.agreement` would end a run with a difference after its first rollout
or update, but not where rounding in bfloat16 hides the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

COHERE2_WINDOW = 4096  # the family's default
# Families of which vLLM's feed-forward layers compare the activation's name with this one.
ONLY_SILU = ("exaone4", "glm4", "granite", "llama", "mistral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
UNUSED_BIASES = {"ernie4_5": "use_bias", "qwen3": "attention_bias", "qwen3_moe": "attention_bias"}  # by the key that adds them
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # vLLM reads other names as these
DIFFERING = {"cohere2_moe": 0.04, "deepseek_v2": 0.04, "deepseek_v3": 0.04, "hrm_text": 0.008}  # mean of random policies, nats
# Families of which an engine cannot hold or compute the policy, and why.
REFUSED = {
    "dbrx": "vLLM cannot load new weights into it",
    "diffllama": "vLLM cannot build it from the code of transformers",
    "laguna": "vLLM leaves out the routers' biases when it loads new weights",
    "minimax": "vLLM cannot build it from the code of transformers",
    "minimax_m2": "vLLM cannot load new weights into it",
    "recurrent_gemma": "vLLM cannot build it from the code of transformers",
    "phi": "vLLM does not use the output head's bias",
}
# Families that vLLM cannot compute on CPU only.
REFUSED_ON_CPU = ("falcon_h1", "gpt_oss", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "mimo_v2_flash", "olmo_hybrid", "phimoe")


def find_obstacle(config: JsonObject, dtype: str, on_cpu: bool) -> str | None:
    """Return why no engine can run a policy with this configuration, or None."""
    text = config.get("text_config") or config
    kind = str(text.get("model_type"))
    if kind == "stablelm" and (key := next((key for key in ("use_parallel_residual", "qk_layernorm") if text.get(key)), None)):
        return f"vLLM's has other norms than transformers' with {key}"
    if kind == "qwen2" and len(set(text.get("layer_types") or ())) > 1:
        return "vLLM takes a sliding window in all layers or in none, and it is in some of them"
    if kind in ONLY_SILU and (name := text.get("hidden_act") or "silu") != "silu":
        return f"vLLM has only the activation silu for it, and config.json names {name}"
    if kind.startswith("qwen3_5") and find_spec("torchvision") is None:
        return "vLLM needs torchvision for it, which is not installed"
    if kind.startswith(("qwen3_5", "qwen3_next")) and on_cpu and dtype == "float32":
        return "vLLM on CPU computes its linear attention in bfloat16 only; set policy.dtype to it"
    if any(name.endswith("ForMaskedLM") for name in config.get("architectures") or ()):
        return "it is no causal language model"
    if lacks_model(config):
        return f"vLLM has no model {config['architectures'][0]}"
    if kind in REFUSED or not on_cpu:
        return REFUSED.get(kind)
    if kind in REFUSED_ON_CPU:
        return "vLLM cannot compute it on CPU"
    size = _head_size(text)  # odd in tiny random models that libraries test with
    return f"vLLM on CPU has no attention for heads of {size} values" if size is not None and size % 16 else None


def lacks_model(config: JsonObject) -> bool:
    """Return whether vLLM here has neither a model of its own for this configuration nor a way to run the one of transformers.

    It runs those that leave attention to it. Both packages are read as text: importing vLLM takes seconds.
    """
    names: list[str] = config.get("architectures") or []
    if len(names) != 1 or not names[0].endswith(CAUSAL) or config.get("auto_map"):
        return False
    kind = str(config.get("model_type")).replace("-", "_")
    known = package_source("vllm", "model_executor/models/registry.py")
    code = package_source("transformers", f"models/{kind}/modeling_{kind}.py")
    if not known or not code or f'"{names[0]}": (' in known:
        return False
    leaves_attention = "_supports_attention_backend = True" in code or "ALL_ATTENTION_FUNCTIONS.get_interface(" in code
    return not leaves_attention or f"class {names[0]}(" not in code


def package_source(package: str, file: str) -> str:
    """Return the text of an installed package's file, or "" if there is none."""
    spec = PathFinder.find_spec(package)
    paths = [Path(folder, file) for folder in (spec and spec.submodule_search_locations) or ()]
    return next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), "")


def _head_size(text: JsonObject) -> int | None:
    """Return the values of an attention head, or None if the configuration names other sizes than usual."""
    width, heads = text.get("hidden_size", text.get("n_embd")), text.get("num_attention_heads", text.get("n_head"))
    if text.get("kv_lora_rank") or not isinstance(width, int) or not isinstance(heads, int) or not heads:
        return None
    return text.get("head_dim") or width // heads


def check_engines(recipe: Recipe, config: JsonObject, resource: str) -> None:
    """Raise UserError if no engine can run the policy on slots of this kind: "cpu", "gpu", or "" if it is not known yet."""
    if why := find_obstacle(config, recipe.policy.dtype, resource == "cpu"):
        kind = (config.get("text_config") or config).get("model_type")
        raise UserError(f"policy.path: engines cannot run a policy of the type `{kind}`: {why}; take another model")


def find_difference(config: Mapping[str, Any], longest_tokens: int) -> str | None:
    """Return why engines would sample from another policy than the learner trains, or None.

    `longest_tokens`: of the longest possible sequence.
    """
    text = config.get("text_config") or config
    kind = text.get("model_type")
    if (key := UNUSED_BIASES.get(str(kind))) and text.get(key):
        return f"with {key} transformers has biases that vLLM does not use"
    if kind in DIFFERING:
        return f"log-probabilities of a token differed by {DIFFERING[kind]} nats and more on average"
    if kind == "doge":
        return "after an update log-probabilities of a token differed by 0.00015 nats: vLLM leaves out its dynamic attention mask"
    if kind == "cohere2":
        window = text.get("sliding_window") or COHERE2_WINDOW
        if longest_tokens > window:
            return f"vLLM's attention window is {window + 1} tokens, and transformers' is {window}; keep sequences within {window} tokens"
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
        original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        if isinstance(original, int) and longest_tokens > original:
            return (
                f"of its longrope vLLM takes the long factors for every sequence, and transformers only beyond {original} tokens; keep "
                f"sequences within {original} tokens"
            )
    return None


def check_differences(recipe: Recipe, config: Mapping[str, object], longest_prompt_tokens: int) -> None:
    """Raise UserError for such a policy, unless nothing is learned or `rollout.agreement` is `warn`."""
    longest = recipe.longest_tokens(longest_prompt_tokens)
    if recipe.learns and recipe.rollout.agreement == "end" and (why := find_difference(config, longest)):
        raise UserError(
            f"policy.path: engines would sample from another policy ({longest} tokens at most): {why}; take another model, or set "
            "rollout.agreement=warn to train anyway"
        )
