"""Merge LoRA adapters into their base weights: W + scale · B A (Hu et al. 2021, section 4.1, arXiv 2106.09685)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.weights.model_folder import ADAPTER, PACKED, stored_tensors, tensor_shapes
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
# options of adapter_config.json that change more than W + scale · B A
UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "trainable_token_indices",
    "layer_replication",
    "megatron_config",
    "alora_invocation_tokens",
)

# Adapters that engines can hold: families of policies in which tests compare engines with the learner, and their layers.
SERVED_FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
ADAPTABLE = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")
MAX_RANK = 512  # vLLM's limit
MADE_HEADS = ("lm_head", "score")  # heads that weights files may lack
MOST_NAMES = 20  # layers that a message lists
SERVED_PARAMETERS, SERVED_TOKENS = 100_000_000, 64  # see `choose_publish`


@dataclass
class Adapter:
    """A LoRA adapter.

    `pairs`: weight name → (A (rank, in), B (out, rank)). `whole`: weights that replace those of the base model.
    """

    scale: dict[str, float]
    pairs: dict[str, tuple[Tensor, Tensor]]
    whole: dict[str, Tensor]
    transposed: frozenset[str] = frozenset()  # names of weights stored as (in, out)
    used: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Read a folder saved by peft. Raises UserError for other kinds of adapters and for incomplete ones."""
        from safetensors.torch import load_file

        try:
            config = json.loads((folder / CONFIG).read_text())
        except (OSError, ValueError):
            raise UserError(f"{folder}: adapter_config.json is missing or not readable; give a folder saved by peft") from None
        if config.get("peft_type") != "LORA":
            raise UserError(f"{folder}: the adapter is {config.get('peft_type')}, not LORA")
        if on := [name for name in UNSUPPORTED if config.get(name)]:
            raise UserError(f"{folder}: the adapter uses {on[0]}, which is not merged here; merge it with peft")
        if config.get("bias", "none") != "none":
            raise UserError(f"{folder}: the adapter trains biases (bias = {config['bias']}), which is not merged here; merge it with peft")
        if not (folder / ADAPTER).is_file():
            raise UserError(f"{folder}: there is no {ADAPTER}; save it with safe_serialization")
        return cls.of(config, load_file(folder / ADAPTER), f"{folder}: ")

    @classmethod
    def of(cls, config: JsonObject, tensors: Mapping[str, Tensor], where: str = "") -> Adapter:
        """Convert peft's config and its tensors by name. Raises UserError if one of a pair is missing."""
        pairs: dict[str, dict[str, Tensor]] = {}
        embeddings: set[str] = set()
        whole: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            name = name.removeprefix(PREFIX)
            match = re.fullmatch(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.\w+)?(?:\.weight)?", name)
            if match is None:
                whole[re.sub(r"\.(?:modules_to_save|base_layer)\b(?:\.default)?", "", name)] = tensor
            else:
                pairs.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
                embeddings |= {f"{match[1]}.weight"} if "lora_embedding" in name else set()
        if unpaired := [name for name, parts in pairs.items() if len(parts) != 2]:
            raise UserError(f"{where}{unpaired[0]} has only one of its two adapter matrices")
        both = {name: (parts["A"], parts["B"]) for name, parts in pairs.items()}
        scale = {name: _scale(config, name.removesuffix(".weight")) for name in both}
        return cls(scale, both, whole, frozenset(both if config.get("fan_in_fan_out") else embeddings))

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight merged with its adapter, computed in float32, in its own dtype. Other weights are unchanged."""
        if name in self.whole:
            self.used.add(name)
            weight = self.whole[name].to(weight.dtype)
        if name not in self.pairs:
            return weight
        self.used.add(name)
        a, b = self.pairs[name]
        update = self.scale[name] * (b.float() @ a.float())
        update = update.T if name in self.transposed else update
        if update.shape != weight.shape:
            raise UserError(f"{name}: the adapter has shape {tuple(update.shape)}, but the base model's weight has {tuple(weight.shape)}")
        return (weight.float() + update).to(weight.dtype)

    def unused(self) -> list[str]:
        return sorted((self.pairs.keys() | self.whole.keys()) - self.used)

    def check(self, shapes: Mapping[str, Sequence[int]], head: str = "") -> None:
        """Raise UserError unless the adapter fits a base model with these shapes by name. `head`: see `merge_folder`."""
        added = {name for name in self.whole if f"{head}.weight" in self.whole and name.startswith(f"{head}.")} if head else set()
        if left := sorted((self.pairs.keys() | self.whole.keys()) - shapes.keys() - added):
            raise UserError(f"the base model has no weight `{left[0]}`, which the adapter changes ({len(left)} such)")
        for name, (a, b) in sorted(self.pairs.items()):
            shape, there = (b.shape[0], a.shape[1]), tuple(shapes[name])
            shape = shape[::-1] if name in self.transposed else shape
            if shape != there:
                raise UserError(f"{name}: the adapter has shape {shape}, but the base model's weight has {there}")
        for name, tensor in sorted(self.whole.items()):
            if name in shapes and tuple(tensor.shape) != (there := tuple(shapes[name])):
                raise UserError(f"{name}: the adapter's has shape {tuple(tensor.shape)}, but the base model's weight has {there}")
        if head and f"{head}.weight" not in {*shapes, *added}:
            raise UserError(f"neither the base model nor the adapter has a scalar head `{head}`: this is not a reward model")


def with_base(config: bytes, base: str) -> bytes:
    """Return an adapter's config with the base model's name in it."""
    return json.dumps({**json.loads(config), "base_model_name_or_path": base}, indent=2, sort_keys=True).encode()


def not_served(model_type: str, rank: int, targets: Sequence[str]) -> str | None:
    """Return why engines cannot hold such an adapter on a policy of this family, or None if they can."""
    if model_type not in SERVED_FAMILIES:
        return f"engines hold adapters of {', '.join(SERVED_FAMILIES)}, and the policy is {model_type}"
    if other := [name for name in targets if name != "all-linear" and name.rsplit(".", 1)[-1] not in ADAPTABLE]:
        return f"engines adapt linear layers only, and lora.target_modules has {other[0]}"
    return f"engines take a rank of {MAX_RANK} at most, and lora.rank is {rank}" if rank > MAX_RANK else None


def check_targets(targets: Sequence[str], *models: Files) -> None:
    """Raise UserError for an entry of `lora.target_modules` that is the end of no layer's name in any of these models' weights.

    Otherwise it would be ignored beside others. The output head may be that of the embeddings, and a critic's head is made.
    """
    stored = [name for files in models for name, _ in tensor_shapes(files)]
    layers = {name.rpartition(".")[0] for name in stored if name.endswith((".weight", PACKED))}
    for target in targets:
        if not layers or target in ("all-linear", *MADE_HEADS) or any(f".{name}".endswith(f".{target}") for name in layers):
            continue
        ends = sorted({name.rpartition(".")[2] for name in layers})
        raise UserError(f"lora.target_modules: no layer is called `{target}`; the weights have {', '.join(ends[:MOST_NAMES])}")


def choose_publish(publish: str, served: bool, device: str, parameters: int, longest_response: int) -> str:
    """Resolve `lora.publish` to `merged` or `adapter`. `served`: whether engines can hold the adapter, see `not_served`.

    `auto` is the faster of both by the measurements of `benchmarks.serving`, and `merged` on GPUs, where nothing was measured. With 494 M
    parameters in bfloat16 an adapter saved 1.8 to 2.2 s of each update, and cost 20 to 33 ms of each decode step.
    """
    if publish != "auto":
        return publish
    pays = device == "cpu" and parameters >= SERVED_PARAMETERS and longest_response <= SERVED_TOKENS
    return "adapter" if pays and served else "merged"


def _scale(config: JsonObject, module: str) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA. Patterns on the ends of module names may override both."""
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: JsonObject | None, module: str, otherwise: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def merge_folder(base: Path, adapter: Adapter, output: Path, dtype: str, head: str = "") -> None:
    """Write the base model's folder with the adapter merged, file by file, with floating-point weights in `dtype`.

    `head`: name of a scalar head that the adapter may add to the base model. Raises UserError, and writes nothing, if a part of the
    adapter fits no weight of the base model, or if the head is missing.
    """
    import torch
    from safetensors.torch import load_file, save_file

    adapter.check({name: entry["shape"] for name, entry in stored_tensors(base).items()}, head)
    torch_dtype = getattr(torch, dtype)
    output.mkdir(parents=True, exist_ok=True)
    files = sorted(base.glob("*.safetensors"))
    for file in files:
        tensors = {name: adapter.merged(name, weight) for name, weight in load_file(file).items()}
        if file == files[-1] and f"{head}.weight" in adapter.unused():
            tensors |= {name: adapter.whole[name] for name in adapter.unused() if name.startswith(f"{head}.")}
            adapter.used |= tensors.keys()
        cast = {name: (t.to(torch_dtype) if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
        save_file(cast, output / file.name, {"format": "pt"})
