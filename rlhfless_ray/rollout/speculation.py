"""Check `rollout.speculation` and `rollout.drafter` before a run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.engine.head_config import EMBEDDINGS, NEEDED, is_head, plain_name, refusal
from rlhfless_ray.prefix.supported_models import unsupported
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.load_policy import check_files, load_tokenizer, model_folder
from rlhfless_ray.weights.model_folder import check_tokenizer, config_of, read_folder, split_files, stored_weights
from rlhfless_ray.weights.tensor_file import Files, save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "rollout.drafter"
INSTALL = "pip install 'rlhfless-ray[drafts]'"


def check_speculation(recipe: Recipe, policy: Files) -> tuple[Recipe, str | None]:
    """Return the recipe, without `auto` drafts if they cannot be made or verified, and a note about that or None.

    They are made with suffix trees of an optional package. Rejected drafts are overwritten in the KV cache. A recurrent state cannot undo
    them, and a sliding window may have dropped the tokens that they replaced. Raises UserError if the recipe requires drafts all the same.
    """
    rollout = recipe.rollout
    if rollout.speculation == "off":
        return recipe, None
    without = {"rollout.speculation": "off", "rollout.drafter": "", "rollout.drafter_train": "off"}
    if rollout.engine == "stock":
        return recipe.with_settings(without), "no tokens are drafted, because rollout.engine is stock"
    is_installed, why = find_spec("arctic_inference") is not None, unsupported(config_of(policy))
    if is_installed and why is None:
        return recipe, None
    if rollout.speculation == "on" and not is_installed:
        raise UserError(f"rollout.speculation: drafts need a package that is not installed; run {INSTALL}, or set it to auto or off")
    if rollout.speculation == "on":
        raise UserError(f"rollout.speculation: this policy cannot verify drafts, because {why}; set it to auto or off")
    why = f"because of the policy: {why}" if why else f"because arctic-inference is not installed ({INSTALL})"
    return recipe.with_settings(without), f"no tokens are drafted, {why}"


def read_drafter(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, policy: Files) -> Files | None:
    """Return the files of `rollout.drafter`, of a small random model for `train`, or None without a drafter.

    `policy`: the policy's files. Raises UserError if the drafter is neither a model with the policy's tokens nor a head for this policy.
    """
    rollout = recipe.rollout
    if not rollout.drafter:
        return _random_drafter(recipe, config_of(policy)) if rollout.drafter_train == "on" else None
    folder = model_folder(rollout.drafter, KEY)
    files = read_folder(folder, KEY, needs_tokenizer=False)
    config = config_of(files)
    if is_head(config):
        return _checked_head(recipe, files, policy)
    check_tokenizer(files, folder, KEY)
    words = tokenizer.get_vocab()
    if why := unsupported(config):
        raise UserError(f"{KEY}: a drafter needs full attention in each layer, but {why}; name another model, or leave it out")
    if load_tokenizer(files, recipe.policy.trust_remote_code, KEY).get_vocab() != words:
        raise UserError(
            f"{KEY}: its tokenizer has other tokens than the policy's, so its drafts are useless; name one with the same tokens"
        )
    size, tokens = (config.get("text_config") or config).get("vocab_size", 0), max(words.values()) + 1
    if size < tokens:
        raise UserError(f"{KEY}: its vocab_size {size} does not cover the tokenizer's {tokens} tokens; name a model that has them all")
    check_files(files, KEY)
    return files


def _checked_head(recipe: Recipe, head: Files, policy: Files) -> Files:
    """Return the files of a head, with the policy's embeddings if engines have several members, each of which has a part of them."""
    if why := refusal(config_of(head), config_of(policy)):
        raise UserError(f"{KEY}: {why}")
    if recipe.rollout.drafter_train == "on":
        raise UserError("rollout.drafter_train: an EAGLE head is trained before a run, with `rlhfless drafter`; set it to off")
    names = {plain_name(name) for name, _ in stored_weights(head)}
    if missing := [name for name in NEEDED if name not in names]:
        raise UserError(f"{KEY}: the head has no {missing[0]}, so it is no EAGLE-3 head with a Llama layer")
    if recipe.rollout.tensor_parallel == 1 or EMBEDDINGS in names:
        return head
    embeddings = next(tensor for name, tensor in stored_weights(policy) if name.endswith(EMBEDDINGS))
    return {**head, "embeddings.safetensors": save_tensors({EMBEDDINGS: embeddings}, {"format": "pt"})}


def random_drafter_config(recipe: Recipe, policy: JsonObject) -> JsonObject:
    """Return the config.json of a drafter with random weights. `policy`: that of the policy."""
    text, width = policy.get("text_config") or policy, recipe.rollout.drafter_hidden_size
    return {
        "model_type": "qwen2",
        "vocab_size": text["vocab_size"],
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": recipe.rollout.drafter_layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "max_position_embeddings": text.get("max_position_embeddings", 1 << 15),
        "tie_word_embeddings": True,
        "initializer_range": 0.5 * width**-0.5,
    }


def _random_drafter(recipe: Recipe, policy: JsonObject) -> Files:
    """Return the files of a small model with the policy's tokens. Its weights follow from the run's seed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**random_drafter_config(recipe, policy))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.run.seed % 2**63)
        model: Any = Qwen2ForCausalLM(config)
    return {"config.json": config.to_json_string().encode(), **split_files(dict(model.named_parameters()))}
