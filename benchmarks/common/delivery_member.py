"""A member of an engine without vLLM, for `benchmarks.weight_delivery`: it copies its slices of a weight version into memory of its own.

`python -m benchmarks.common.delivery_member` starts a further member, whose standard input is the connection.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch

from rlhfless_ray.local.member_process import connect
from rlhfless_ray.weights.channel import WeightChannel
from rlhfless_ray.weights.tensor_file import as_tensor
from rlhfless_ray.weights.tensor_slice import TensorSlice

AXES = {r"(q|k|v|gate|up)_proj|embed|lm_head": 0, r"(o|down)_proj": 1}  # along which members share out matrices


def own_slice(name: str, shape: tuple[int, ...], member: int, width: int) -> TensorSlice:
    axis = next((axis for pattern, axis in AXES.items() if re.search(pattern, name)), None)
    if axis is None or width == 1:
        return TensorSlice.whole(name, shape)
    size = shape[axis] // width
    return TensorSlice.along(name, shape, axis, member * size, size)


class Member:
    """One member's memory, and both ways into it."""

    def __init__(self, member: int, width: int) -> None:
        self.member, self.width = member, width
        self.own: dict[str, np.ndarray] = {}

    def _memory(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return self.own.setdefault(name, np.empty(shape, dtype))

    def fetch(self, channel: WeightChannel, version: int) -> tuple[float, int]:
        """Fetch what is this member's. Returns seconds and bytes."""
        start, size = time.perf_counter(), 0
        channel.check(version, self.member, self.width)
        for name, (shape, dtype) in channel.contents(version).items():
            piece = own_slice(name, shape, self.member, self.width)
            memory = self._memory(name, piece.values_shape, dtype)
            values = channel.fetch(version, piece, memory)
            if not np.shares_memory(values, memory):
                as_tensor(memory).copy_(as_tensor(values))
            size += values.nbytes
        return time.perf_counter() - start, size

    def take(self, arriving: Iterator[tuple[str, np.ndarray]]) -> tuple[float, int]:
        """Copy what is this member's out of whole tensors. Returns seconds and bytes."""
        start, size = time.perf_counter(), 0
        for name, array in arriving:
            piece = own_slice(name, array.shape, self.member, self.width)
            axis = 1 if not piece.is_flat else 0
            count = piece.values_shape[axis]
            values = as_tensor(array) if count == array.shape[axis] else as_tensor(array).narrow(axis, self.member * count, count)
            as_tensor(self._memory(name, piece.values_shape, array.dtype)).copy_(values)
            size += array.nbytes
        return time.perf_counter() - start, size


def send(writer: BinaryIO, weights: Mapping[str, np.ndarray]) -> None:
    """Send whole tensors as engines did before members fetched slices."""
    for name, array in weights.items():
        pickle.dump((name, array.dtype, array.shape), writer)
        writer.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    pickle.dump(None, writer)
    writer.flush()


def receive(reader: BinaryIO) -> Iterator[tuple[str, np.ndarray]]:
    while (header := pickle.load(reader)) is not None:
        name, dtype, shape = header
        array = np.empty(shape, dtype)
        reader.readinto(array.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
        yield name, array


def main() -> None:
    reader, writer = connect()
    torch.set_num_threads(1)
    member: Any = None
    while True:
        method, args, _ = pickle.load(reader)
        if method == "build":
            member, reply = Member(*args), None
        else:
            reply = member.fetch(*args) if method == "fetch" else member.take(receive(reader))
        pickle.dump(reply, writer)
        writer.flush()


if __name__ == "__main__":
    main()
