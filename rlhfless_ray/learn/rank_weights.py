"""The weights of a rank that trains, by name: which it stores, publishes and reads back."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlhfless_ray.learn.lora import LoraAdapters, saved_name
from rlhfless_ray.learn.optimizer_state import held_weights, parameter_sizes, whole_weights
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.learn.tensor_parallel import ModelSlices
from rlhfless_ray.local.process_memory import release_free_heap, release_pages
from rlhfless_ray.weights.layout import whole_layers
from rlhfless_ray.weights.saved_names import saved_state, unconverted_names
from rlhfless_ray.weights.tensor_file import as_numpy, as_tensor
from rlhfless_ray.weights.tensor_slice import Slices, TensorSlice, whole_slices


class RankWeights:
    """The weights of a model that DeepSpeed trains. Every rank must make the same calls."""

    def __init__(self, settings: RankSettings, engine: Any, lora: LoraAdapters | None, slices: ModelSlices | None, is_large: bool) -> None:
        """`slices`: this rank's slice of each tensor, if several ranks share a copy. `is_large`: whether memory is worth releasing."""
        self.settings, self.rank, self.ranks, self.stage = settings, settings.rank, settings.learner.ranks, settings.learner.zero_stage
        self.engine, self.lora, self.slices, self.is_large = engine, lora, slices, is_large
        self.as_published: set[str] = set()  # names of weights that were published unchanged under the same name

    def is_tied(self, name: str) -> bool:
        """Return whether a name is the second one of tied weights, which files and engines do not have."""
        return name == "lm_head.weight" and getattr(self.engine.module.model.config, "tie_word_embeddings", False)

    def sizes(self) -> dict[str, int]:
        """Return {name: elements} of all weights."""
        sizes = parameter_sizes(self.engine, self.stage, self.slices)
        return {name: size for name, size in sizes.items() if not self.is_tied(name)}

    def stored(self) -> dict[str, int]:
        """Return {name: elements} of the weights in a checkpoint: all, or the adapters if only these are trained."""
        return {name: size for name, size in self.sizes().items() if self.lora is None or self.lora.is_trained(name)}

    def of_owner(self, owner: dict[str, int]) -> dict[str, Tensor]:
        return dict(whole_weights(self.engine, self.stage, owner, self.slices))

    def own_layers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the model, tensor) of this rank's share of what a checkpoint has. Every rank must read all."""
        return whole_weights(self.engine, self.stage, whole_layers(self.stored(), self.ranks), self.slices)

    @property
    def holds_all(self) -> bool:
        """Whether each rank holds all weights as they are published, so that those of each node can publish all of them.

        Merged adapters are computed for each version, which unlike devices round differently. So at ZeRO 1 and 2, where the adapters
        themselves are equal, each layer is merged by one rank. At ZeRO 0 they may not be, and the driver compares them.
        """
        merges = self.stage > 0 and self.lora is not None and self.settings.lora.publish != "adapter"
        return self.stage < 3 and self.settings.learner.tensor_parallel == 1 and not merges

    def published(self, place: int | None = None, count: int | None = None) -> Slices:
        """Return this rank's slices of the weights that engines get, by their names in a file (see `saved_state`). Every rank must call it.

        With ZeRO 3 they are the parts of each tensor that the rank holds. Otherwise, and where tensors are computed from several or have
        another form in files, layers are shared out among the ranks. With `lora.publish: adapter` the first one returns the adapter.

        Args:
            place: this rank's number among those that share out the layers, if these are not all ranks; needs `holds_all`.
            count: number of these ranks.
        """
        place, count = (self.rank, self.ranks) if place is None or count is None else (place, count)
        first = self.rank - place  # ranks count from here on
        if self.lora is not None and self.settings.lora.publish == "adapter":
            own = self.of_owner(dict.fromkeys(self.stored(), first))
            return {} if place else whole_slices({saved_name(k): as_numpy(v) for k, v in own.items()})
        parts: dict[TensorSlice, np.ndarray] = {}
        if self.stage == 3 and self.lora is None:
            whole = unconverted_names(self.engine.module.model)
            parts = {piece: as_numpy(values) for piece, values in held_weights(self.engine, 3).items() if piece.name in whole}
        names = {piece.name for piece in parts}
        owner = whole_layers({name: size for name, size in self.sizes().items() if name not in names}, count)
        found = self.merged({name: first + number for name, number in owner.items()})
        if self.reads_published:  # the other ranks' weights are the same
            self.as_published = unconverted_names(self.engine.module.model)
        return {**parts, **whole_slices({name: as_numpy(tensor) for name, tensor in found.items()})}

    @property
    def reads_published(self) -> bool:
        """Whether `read_published` saves memory, because the next step computes all weights from the optimizer's own copy."""
        return self.is_large and self.stage in (1, 2) and self.lora is None and self.slices is None

    def read_published(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take the weights from their published version, in shared memory, and release the memory of the rank's own.

        The next optimizer step writes its own again. Every rank has the same weights, so ranks of a node share them.

        Args:
            weights: {name: array} of the shards that lie on the rank's node.
        """
        for name, parameter in self.engine.module.model.named_parameters():
            if name in self.as_published and name in weights:
                start, size = parameter.data_ptr(), parameter.nbytes
                parameter.data = as_tensor(weights[name])
                release_pages(start, size)
        gc.collect()  # an update leaves 0.3 GB behind at 494 M parameters
        release_free_heap()

    def merged(self, owner: dict[str, int]) -> dict[str, Tensor]:
        """Return this rank's weights in the form of files, adapters merged. Every rank must call it. `owner`: rank of each parameter."""
        weights = self.of_owner(owner)
        weights = weights if self.lora is None else self.lora.merged(weights)
        return saved_state(self.engine.module.model, {name: tensor for name, tensor in weights.items() if not self.is_tied(name)})

    def trained(self) -> dict[str, Tensor]:
        """Return all weights that are trained, by their names in the model, from rank 0. Every rank must call it."""
        return self.of_owner(dict.fromkeys(self.stored(), 0))
