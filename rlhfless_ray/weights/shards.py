"""Tensors in several safetensors files. Each file has whole tensors, or flat intervals of tensors that other files complete."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rlhfless_ray.weights.layout import Cut, pieces
from rlhfless_ray.weights.tensor_file import Content, FileParts, RemoteFile, load_tensors, read_metadata, read_sizes, save_tensors

if TYPE_CHECKING:
    from torch import Tensor

STARTS = "starts"  # in a file's metadata: {tensor name: first element}, for tensors that are intervals
CUTS = "cuts"  # {tensor name: [shape, axis, first, size]}, for tensors that are intervals of a `Cut`


def shard_name(stem: str, rank: int, ranks: int) -> str:
    """Return the name of a rank's file. One rank's file has no number."""
    return f"{stem}.safetensors" if ranks == 1 else f"{stem}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def save_intervals(
    parts: Mapping[str, tuple[int, Tensor]], whole: Mapping[str, Tensor], cuts: Mapping[str, Cut] | None = None
) -> FileParts:
    """Lay out intervals (name → first element, flat tensor) and whole tensors as one safetensors file.

    `cuts`: the cuts that intervals belong to, for tensors that were divided along an axis.
    """
    starts = json.dumps({name: start for name, (start, _) in parts.items()}, separators=(",", ":"))
    metadata = {STARTS: starts} if parts else {}
    if cuts:
        metadata[CUTS] = json.dumps({name: astuple(cut) for name, cut in cuts.items()}, separators=(",", ":"))
    return save_tensors({**{name: tensor for name, (_, tensor) in parts.items()}, **whole}, metadata or None)


def has_intervals(content: Content) -> bool:
    """Return whether a file of `save_intervals` has intervals. Other files have whole tensors."""
    return STARTS in read_metadata(content)


class _File:
    """One file. Its tensors are read when they are used first."""

    def __init__(self, content: Content | RemoteFile) -> None:
        self.content = content
        self.header = content.header if isinstance(content, RemoteFile) else content

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_tensors(self.content.fetch() if isinstance(self.content, RemoteFile) else self.content)


@dataclass(frozen=True)
class _Piece:
    """An interval of a flattened tensor in a file."""

    name: str
    start: int
    end: int
    file: _File

    @property
    def values(self) -> Tensor:
        return self.file.tensors[self.name].reshape(-1)


class Shards:
    """Tensors whose intervals are in several files. Reads return views of the files' content if possible.

    A `RemoteFile` is fetched when an interval that it has is read.
    """

    def __init__(self, contents: Iterable[Content | RemoteFile]) -> None:
        self._parts: dict[str, list[_Piece]] = {}
        self._cuts: dict[str, list[Cut]] = {}  # cuts of the parts, in their order, of tensors that were divided along an axis
        for file in map(_File, contents):
            metadata = read_metadata(file.header)
            starts, cuts = (json.loads(metadata.get(key, "{}")) for key in (STARTS, CUTS))
            for name, size in read_sizes(file.header).items():
                start = starts.get(name, 0)
                self._parts.setdefault(name, []).append(_Piece(name, start, start + size, file))
                if name in cuts:
                    shape, axis, first, size = cuts[name]
                    self._cuts.setdefault(name, []).append(Cut(tuple(shape), axis, first, size))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def elements(self, name: str) -> int:
        """Return the elements of a tensor that was not divided along an axis."""
        return max(part.end for part in self._parts[name])

    def read(self, name: str, start: int, end: int, cut: Cut | None = None) -> Tensor:
        """Return elements `start` to `end` of a flattened tensor, or of a flattened cut of it.

        Raises KeyError, or ValueError if some are in no file.
        """
        import torch

        if cut is not None and cut not in self._cuts.get(name, ()):
            matrix = self.read(name, 0, math.prod(cut.shape)).view(-1, cut.row_elements)
            blocks = [matrix[slice(*rows), slice(*columns)] for _, (rows, columns) in cut.blocks((start, end))]
            return torch.cat([block.reshape(-1) for block in blocks]) if blocks else matrix.reshape(-1)[:0]
        parts = self._parts[name]
        if cut is not None:  # saved as the same cut
            parts = [part for part, of_part in zip(parts, self._cuts[name], strict=True) if of_part == cut]
        elif name in self._cuts:
            return self._assembled(name)[start:end]
        try:
            plan = pieces((start, end), [(part.start, part.end) for part in parts])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        read = [parts[holder].values[a - parts[holder].start : b - parts[holder].start] for holder, (a, b) in plan]
        return read[0] if len(read) == 1 else torch.cat(read) if read else torch.empty(0)

    def _assembled(self, name: str) -> Tensor:
        """Assemble a tensor that was divided along an axis, flattened. Raises ValueError if some of it is in no file."""
        import torch

        cuts, parts = self._cuts[name], self._parts[name]
        whole = torch.empty(math.prod(cuts[0].shape), dtype=parts[0].values.dtype)
        matrix = whole.view(-1, cuts[0].row_elements)
        missing = torch.ones(matrix.shape, dtype=torch.bool)
        for cut, part in zip(cuts, parts, strict=True):
            for (a, b), (rows, columns) in cut.blocks((part.start, part.end)):
                block = slice(*rows), slice(*columns)
                matrix[block] = part.values[a:b].view(rows[1] - rows[0], -1)
                missing[block] = False
        if missing.any():
            raise ValueError(f"{name}: {int(missing.sum())} elements are in no part")
        return whole

    def whole(self, name: str) -> Tensor:
        """Return a tensor that one file has whole."""
        (part,) = self._parts[name]
        return part.file.tensors[name]
