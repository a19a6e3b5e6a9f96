"""Pieces of tensors in several safetensors files, which complete each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhfless_ray.weights.layout import padded_share
from rlhfless_ray.weights.tensor_file import (
    Content,
    FileParts,
    RemoteFile,
    as_numpy,
    iterate_tensors,
    load_tensors,
    read_metadata,
    read_shapes,
    save_tensors,
)
from rlhfless_ray.weights.tensor_slice import UNKNOWN, HeldSlices, Slices, TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

STARTS = "starts"  # in a file's metadata: {tensor name: first element}, for tensors that are slices
CUTS = "cuts"  # {tensor name: [shape, axis, first, size]}, for slices of a tensor that is divided along an axis


def shard_name(stem: str, rank: int, ranks: int) -> str:
    """Return the name of a rank's file. One rank's file has no number."""
    return f"{stem}.safetensors" if ranks == 1 else f"{stem}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def save_slices(slices: Mapping[TensorSlice, Tensor]) -> FileParts:
    """Lay out slices (flat tensors), at most one of each tensor, as one safetensors file."""
    starts = {piece.name: piece.start for piece in slices}
    cuts = {piece.name: [piece.shape, piece.axis, piece.first, piece.size] for piece in slices if not piece.is_flat}
    metadata = {key: json.dumps(found, separators=(",", ":")) for key, found in ((STARTS, starts), (CUTS, cuts)) if found}
    return save_tensors({piece.name: tensor for piece, tensor in slices.items()}, metadata or None)


def has_intervals(content: Content) -> bool:
    """Return whether a file of `save_slices` has any. Other files have whole tensors."""
    return STARTS in read_metadata(content)


def share_of(content: Content, rank: int, ranks: int) -> Slices:
    """Return a rank's share of every tensor of a file, as ZeRO 3 divides them. They are views of the file if possible."""
    arrays = ((name, as_numpy(tensor)) for name, tensor in iterate_tensors(content))
    shares = ((TensorSlice(name, array.shape, *padded_share(array.size, ranks, rank)), array) for name, array in arrays)
    return {share: array.reshape(-1)[share.start : share.end] for share, array in shares}


def write_slices(path: Path, header: bytes, parts: Iterable[Slices]) -> None:
    """Write a safetensors file with this header, of which only some slices are there. The rest is holes.

    Raises ValueError if a slice is of a tensor that has another shape in the header.
    """
    shapes, tensors = read_shapes(header), json.loads(header[8:])
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + max((tensors[name]["data_offsets"][1] for name in shapes), default=0))
        for piece, values in ((piece, values) for part in parts for piece, values in part.items()):
            if shapes[piece.name] != piece.shape:
                raise ValueError(f"{path.name}: {piece} is of a tensor of shape {piece.shape}, where its header says {shapes[piece.name]}")
            file.seek(len(header) + tensors[piece.name]["data_offsets"][0] + piece.start * values.itemsize)
            file.write(np.ascontiguousarray(values).view(np.uint8).data)


class _File:
    """One file. Its tensors are read when they are used first."""

    def __init__(self, content: Content | RemoteFile) -> None:
        self.content = content
        self.header = content.header if isinstance(content, RemoteFile) else content

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_tensors(self.content.fetch() if isinstance(self.content, RemoteFile) else self.content)

    def values(self, name: str) -> np.ndarray:
        return as_numpy(self.tensors[name]).reshape(-1)

    def pieces(self) -> Iterator[TensorSlice]:
        metadata = read_metadata(self.header)
        starts, cuts = (json.loads(metadata.get(key, "{}")) for key in (STARTS, CUTS))
        for name, shape in read_shapes(self.header).items():
            if name in cuts:
                whole, *cut = cuts[name]
                yield TensorSlice.along(name, whole, *cut).part(starts[name], starts[name] + shape[0])
            elif name in starts:
                yield TensorSlice(name, UNKNOWN, starts[name], starts[name] + shape[0])
            else:
                yield TensorSlice.whole(name, shape)


def slices_in(contents: Iterable[Content | RemoteFile]) -> HeldSlices:
    """Return the slices in these files. A `RemoteFile` is fetched when a slice that it has is read."""
    return HeldSlices((piece, partial(file.values, piece.name)) for file in map(_File, contents) for piece in file.pieces())
