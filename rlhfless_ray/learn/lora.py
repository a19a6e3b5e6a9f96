"""LoRA: train low-rank adapters of a frozen base model (Hu et al. 2021, arXiv 2106.09685), in peft's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.image_inputs import TOWER
from rlhfless_ray.learn.logprobs import CHUNK_START
from rlhfless_ray.weights.adapter import CONFIG, PREFIX, Adapter
from rlhfless_ray.weights.model_folder import ADAPTER
from rlhfless_ray.weights.tensor_file import Content, save_tensors
from rlhfless_ray.weights.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from rlhfless_ray.recipe import LoraConfig

OUTSIDE_TEXT = rf"(.*\.)?{TOWER}\..*"  # layers that never get an adapter
NAME = "default"  # peft's name of a model's only adapter
BASE = ".base_layer"


class LoraAdapters:
    """The adapters of one model. The model is changed in place: its base is frozen, and its forward pass includes them."""

    def __init__(self, model: Any, section: LoraConfig, seed: int, task: str | None = None) -> None:
        """Add adapters to `model`.

        Args:
            section: the recipe's section `lora`.
            seed: of the initial values of A, the same on every rank. B begins at 0.
            task: peft's task type.

        Raises:
            UserError: The model has no such layers, or layers that cannot be merged.
        """
        import peft
        from peft.tuners.lora import Embedding, Linear
        from peft.tuners.lora.layer import LoraLayer

        targets = section.target_modules
        self.config = peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            lora_dropout=0.0,
            bias="none",
            task_type=task,
            target_modules="all-linear" if targets == ["all-linear"] else targets,
            exclude_modules=OUTSIDE_TEXT if hasattr(model.base_model, TOWER) else None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                peft.inject_adapter_in_model(self.config, model)
            except ValueError as error:
                raise UserError(f"lora.target_modules: {one_line(error, 300)}") from None
        layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        self.layers = list(layers.values())
        self.config.lora_dropout = section.dropout
        self.rows: list[tuple[list[int], int, int]] | None = None  # rows of the current forward pass, see `dropping`
        self.dropouts: dict[str, RowDropout] = {}  # by layer
        for number, (name, layer) in enumerate(layers.items() if section.dropout else ()):
            self.dropouts[name] = layer.lora_dropout[NAME] = RowDropout(self, section.dropout, number)
        tied = getattr(model.config, "tie_word_embeddings", False)
        ends = [getattr(model, f"get_{side}_embeddings")() for side in ("input", "output")]
        for name, module in model.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            if type(module) not in (Linear, Embedding):
                kind = type(module).__name__
                raise UserError(f"lora.target_modules: {name} is a {kind}, whose adapter cannot be merged here; leave it out")
            if tied and any(module is end for end in ends):
                raise UserError(f"lora.target_modules: {name} shares its weights with another layer (tied embeddings); leave it out")

    def is_trained(self, name: str) -> bool:
        """Return whether a parameter of the model belongs to an adapter."""
        return ".lora_" in name

    def divide_dropout(self, cuts: Mapping[str, TensorSlice]) -> None:
        """Make each rank that shares a copy of the model drop its own slice of a layer's inputs. `cuts`: see `ModelSlices`."""
        for name, dropout in self.dropouts.items():
            dropout.cut = cuts.get(f"{name}.lora_A.{NAME}.weight")

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters inside the block."""
        for layer in self.layers:
            layer._disable_adapters = True  # peft's own switch would also change which parameters are frozen
        try:
            yield
        finally:
            for layer in self.layers:
                layer._disable_adapters = False

    @contextmanager
    def dropping(self, batch: Batch, sequences: np.ndarray, seed: list[int], numbers: np.ndarray | None = None) -> Iterator[None]:
        """Apply dropout to the adapters' inputs inside the block, in forward passes and in backward passes that repeat them.

        A sequence has the same mask whatever it is batched with. `seed`: a different one for each optimizer step. `numbers`: numbers
        of the batch's sequences, if they are not 0, 1, 2, …
        """
        drawn = sequences if numbers is None else numbers[sequences]
        lengths = zip(drawn.tolist(), batch.lengths[sequences].tolist(), batch.response_lengths[sequences].tolist(), strict=True)
        self.rows = [([*seed, sequence], length, response) for sequence, length, response in lengths]
        try:
            yield
        finally:
            self.rows = None

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole weights with merged adapters, by the base model's names, for engines and files."""
        adapter = Adapter.of(self._config(), {name: x for name, x in weights.items() if self.is_trained(name)})
        named = {name.replace(f"{BASE}.", "."): x for name, x in weights.items() if not self.is_trained(name)}
        return {name: adapter.merged(name, x) for name, x in named.items()}

    def files(self, weights: Mapping[str, Tensor]) -> dict[str, Content]:
        """Return the adapters' files as peft writes and reads them. They do not name a base model."""
        adapters = {saved_name(name): x for name, x in weights.items() if self.is_trained(name)}
        config = {**self._config(), "inference_mode": True}
        return {CONFIG: json.dumps(config, indent=2, sort_keys=True).encode(), ADAPTER: save_tensors(adapters, {"format": "pt"})}

    def _config(self) -> JsonObject:
        return {name: sorted(value) if isinstance(value, set) else value for name, value in self.config.to_dict().items()}


class RowDropout(nn.Module):
    """Dropout with a separate mask for each sequence."""

    def __init__(self, lora: LoraAdapters, share: float, number: int) -> None:
        """`number`: number of the layer, from which its masks are drawn."""
        super().__init__()
        self.lora, self.share, self.number = lora, share, number
        self.cut: TensorSlice | None = None  # of the layer's A, where ranks that share a copy of the model each get a slice of the inputs

    def forward(self, x: Tensor) -> Tensor:
        """Drop inputs. `x` (sequences, length, width), padded on the right; for an output head (response tokens, width).

        An output head may get a chunk of its tokens, see `CHUNK_START`.
        """
        if self.lora.rows is None:
            return x
        if x.dim() == 3:
            kept = torch.zeros_like(x)
            for part, (seed, length, _) in zip(kept, self.lora.rows, strict=True):
                self._draw(part[:length], seed)
        else:
            first, start, parts = CHUNK_START.get(), 0, [x[:0]]
            for seed, _, response in self.lora.rows:
                end = start + response
                if start < first + len(x) and first < end:
                    parts.append(self._draw(x.new_empty(response, x.shape[1]), seed)[max(0, first - start) : first + len(x) - start])
                start = end
            kept = torch.cat(parts)
        return x * kept / (1 - self.share)

    def _draw(self, mask: Tensor, seed: list[int]) -> Tensor:
        """Draw the mask of one sequence in place, and return it."""
        state = int(np.random.SeedSequence([*seed, self.number]).generate_state(1, np.uint64)[0] >> 1)
        generator = torch.Generator(mask.device).manual_seed(state)
        if self.cut is None:
            return mask.bernoulli_(1 - self.share, generator=generator)
        whole = mask.new_empty(len(mask), self.cut.shape[1]).bernoulli_(1 - self.share, generator=generator)
        return mask.copy_(whole.narrow(1, self.cut.first, self.cut.size))


class BaseModel:
    """A model without its adapters, called like the engine around it."""

    def __init__(self, engine: Any, lora: LoraAdapters) -> None:
        self.engine, self.lora = engine, lora

    def __call__(self, *arguments: object, **tensors: Tensor) -> Any:
        with self.lora.off():
            return self.engine(*arguments, **tensors)


def saved_name(name: str) -> str:
    """Return a parameter's name in an adapter's file."""
    return PREFIX + name.replace(f".{NAME}.", ".").removesuffix(f".{NAME}")


def live_name(saved: str) -> str:
    """Return the parameter's name in the model, from its name in an adapter's file."""
    name = saved.removeprefix(PREFIX)
    return f"{name}.{NAME}" if ".lora_embedding_" in name else f"{name.removesuffix('.weight')}.{NAME}.weight"


def trained(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not frozen."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
