"""Tensors in several safetensors files: each file has whole tensors, or flat intervals of tensors that others complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rlhfless_ray.weights.layout import pieces
from rlhfless_ray.weights.tensor_file import Content, FileParts, load_tensors, read_metadata, save_tensors

if TYPE_CHECKING:
    from torch import Tensor

STARTS = "starts"  # in a file's metadata: {tensor name: first element}, for tensors that are intervals


def shard_name(stem: str, rank: int, ranks: int) -> str:
    """Return the name of a rank's file. One rank's file has no number."""
    return f"{stem}.safetensors" if ranks == 1 else f"{stem}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def save_intervals(parts: Mapping[str, tuple[int, Tensor]], whole: Mapping[str, Tensor]) -> FileParts:
    """Lay out intervals (name → first element, flat tensor) and whole tensors as one safetensors file."""
    starts = json.dumps({name: start for name, (start, _) in parts.items()}, separators=(",", ":"))
    return save_tensors({**{name: tensor for name, (_, tensor) in parts.items()}, **whole}, {STARTS: starts} if parts else None)


class Shards:
    """Tensors of which several files have intervals. Reads views of the files' content."""

    def __init__(self, contents: Iterable[Content]) -> None:
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        for content in contents:
            starts = json.loads(read_metadata(content).get(STARTS, "{}"))
            for name, tensor in load_tensors(content).items():
                self._parts.setdefault(name, []).append((starts.get(name, 0), tensor))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `start` to `end` of a flattened tensor. Raises KeyError, or ValueError if some are in no file."""
        import torch

        parts = [(first, tensor.reshape(-1)) for first, tensor in self._parts[name]]
        try:
            plan = pieces((start, end), [(first, first + tensor.numel()) for first, tensor in parts])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        found = [parts[holder][1][a - parts[holder][0] : b - parts[holder][0]] for holder, (a, b) in plan]
        return found[0] if len(found) == 1 else torch.cat(found) if found else parts[0][1][:0]

    def whole(self, name: str) -> Tensor:
        """Return a tensor that one file has whole."""
        ((_, tensor),) = self._parts[name]
        return tensor
