"""Check that a resumed run trains the model of its checkpoint, by the sizes in config.json."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.weights.model_folder import config_of
from rlhfless_ray.weights.tensor_file import Files

OF_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim")
OF_LAYERS = ("intermediate_size", "num_experts", "num_local_experts", "moe_intermediate_size")
SIZES = ("model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "vocab_size", *OF_ATTENTION, *OF_LAYERS)


def model_sizes(files: Files) -> JsonObject:
    """Return what a configuration says about the shapes of a model's weights."""
    config = config_of(files)
    return {key: value for key, value in {**config, **(config.get("text_config") or {})}.items() if key in SIZES}


def check_same_model(before: Mapping[str, object], files: Files) -> None:
    """Raise UserError if a checkpoint's `model_sizes` are of another model than these files. Older checkpoints have none."""
    now = model_sizes(files) if before else {}
    for key, was in before.items():
        if now.get(key, was) != was:
            raise UserError(
                f"--resume: the checkpoint is of another model: its {key} is {was}, and that of policy.path is {now[key]}; name the "
                "model that the run began with, or another run.name"
            )
