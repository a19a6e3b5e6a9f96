"""A weight version as the learner's ranks return it: each has a shard, and all shards together are the version.

A shard has whole tensors, or the parts of tensors that its rank holds, so that no rank gathers them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rlhfless_ray.weights.layout import pieces


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive elements of a tensor that is flattened in C order, from `start` on. `shape`: of the whole tensor."""

    shape: tuple[int, ...]
    start: int
    values: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.values)


Shard = Mapping[str, np.ndarray | Part]


class Assembled(Mapping[str, np.ndarray]):
    """The whole tensors of a version, by name.

    A tensor in one piece is a view of its shard. One in several pieces is assembled each time it is read, so that a reader which takes
    one tensor after the other never holds a copy of all. Reading raises ValueError if elements are in no shard.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._parts: dict[str, list[Part]] = {}
        for shard in shards:
            for name, piece in shard.items():
                part = piece if isinstance(piece, Part) else Part(piece.shape, 0, piece.reshape(-1))
                self._parts.setdefault(name, []).append(part)

    def __getitem__(self, name: str) -> np.ndarray:
        parts = self._parts[name]
        shape, dtype = parts[0].shape, parts[0].values.dtype
        if other := next((part.shape for part in parts if part.shape != shape), None):
            raise ValueError(f"{name}: one shard has a part of a tensor of shape {shape}, another of {other}")
        try:
            plan = pieces((0, math.prod(shape)), [(part.start, part.end) for part in parts])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        read = [parts[holder].values[a - parts[holder].start : b - parts[holder].start] for holder, (a, b) in plan]
        if len(read) != 1:
            read = [np.concatenate([np.zeros(0, np.uint8), *(x.view(np.uint8) for x in read)]).view(dtype)]
        return read[0].reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without reading them."""
        return sum(math.prod(parts[0].shape) * parts[0].values.itemsize for parts in self._parts.values())
