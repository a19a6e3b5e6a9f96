"""Make a policy larger without changing what it says, so that its speed can be measured at a size that would take hours to train."""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import load, save

from rlhfless_ray.weights.model_folder import config_of, split_files, stored_weights, without_weights
from rlhfless_ray.weights.tensor_file import Files

HEAD = 32  # width of a head, also in the larger policy


def widened(files: Files, hidden: int, layers: int) -> Files:
    """Return a Qwen2 policy of this width and depth with the logits of `files`, up to the epsilon of its norms.

    Weights are padded with zeros, and norms are scaled for the zeros in their mean. Layers that are added have random weights, whose
    results are multiplied by zero. It computes as much as any policy of its size.
    """
    config, random = config_of(files), torch.Generator().manual_seed(0)
    ratio = hidden / config["hidden_size"]
    inner = round(config["intermediate_size"] * ratio)
    found = {}
    for name, tensor in stored_weights(files):
        rows = {"down_proj": hidden, "gate_proj": inner, "up_proj": inner}.get(name.split(".")[-2], hidden)
        if name.endswith("norm.weight"):
            found[name] = torch.nn.functional.pad(tensor / math.sqrt(ratio), (0, hidden - len(tensor)))
        elif tensor.dim() == 1:
            found[name] = torch.nn.functional.pad(tensor, (0, rows - len(tensor)))
        else:
            columns = inner if "down_proj" in name else hidden
            rows = len(tensor) if "embed" in name or "lm_head" in name else rows
            found[name] = torch.nn.functional.pad(tensor, (0, columns - tensor.shape[1], 0, rows - len(tensor)))
    first = {name: tensor for name, tensor in found.items() if name.startswith("model.layers.0.")}
    for layer in range(config["num_hidden_layers"], layers):
        for name, tensor in first.items():
            is_output = "o_proj" in name or "down_proj" in name
            more = torch.zeros_like(tensor) if is_output else 0.02 * torch.randn(tensor.shape, generator=random)
            found[name.replace("layers.0.", f"layers.{layer}.")] = more
    heads = hidden // HEAD
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    changed = {**config, **sizes, "num_attention_heads": heads, "num_key_value_heads": heads, "max_window_layers": layers}
    if "layer_types" in config:
        changed["layer_types"] = [config["layer_types"][0]] * layers
    tensors = {name: tensor.contiguous() for name, tensor in found.items()}
    return {**without_weights(files), "config.json": json.dumps(changed).encode(), **split_files(tensors)}


def widened_head(head: Files, hidden: int) -> Files:
    """Return an EAGLE-3 head for the policy after `widened`, whose states are those of the smaller one and zeros."""
    config, tensors = json.loads(bytes(head["config.json"])), load(bytes(head["model.safetensors"]))
    layers = tensors["fc.weight"].split(config["target_hidden_size"], 1)
    padded = [torch.nn.functional.pad(layer, (0, hidden - layer.shape[1])) for layer in layers]
    tensors["fc.weight"] = torch.cat(padded, 1)
    return {"config.json": json.dumps({**config, "target_hidden_size": hidden}).encode(), "model.safetensors": save(tensors)}
