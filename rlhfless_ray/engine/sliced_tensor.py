"""Published tensors as vLLM's loaders take them: of a tensor that a loader narrows, only the slice that it copies is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rlhfless_ray.weights.channel import PublishedVersion
from rlhfless_ray.weights.tensor_file import as_numpy, as_tensor
from rlhfless_ray.weights.tensor_slice import TensorSlice

aten = torch.ops.aten
TYPE_OF = {"bfloat16": torch.bfloat16}


class SlicedTensor(Tensor):
    """A published tensor, or some indices of its axes. It is fetched by any operation that is not a slice of it.

    A copy to a tensor without memory (`meta`), by which vLLM counts what a layer gets, fetches nothing.
    """

    weights: PublishedVersion
    called: str  # the whole tensor
    whole: tuple[int, ...]  # shape of the whole tensor
    firsts: tuple[int, ...]  # first index of each axis

    @staticmethod
    def __new__(cls, weights: PublishedVersion, name: str, whole: tuple[int, ...], firsts: tuple[int, ...], shape: Any, dtype: Any) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        made.weights, made.called, made.whole, made.firsts = weights, name, whole, firsts
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if func is aten.detach.default:
            return first
        if func is aten.narrow.default:
            return first.cut(*args[1:])
        if func is aten.slice.Tensor and (args[4:] or (1,))[0] == 1:
            axis, start, end = (*args[1:4], *(0, None, None)[len(args) - 1 :])[:3]
            start, end, _ = slice(start, end).indices(first.shape[axis])
            return first.cut(axis, start, max(0, end - start))
        if func._schema.is_mutable and isinstance(first, SlicedTensor):
            raise TypeError(f"{func} would change {first.called}, which other members read too")
        if func is aten.copy_.default and first.is_meta:
            return func(first, torch.empty(args[1].shape, dtype=args[1].dtype, device="meta"), *args[2:])
        if func is aten.copy_.default and first.device.type == "cpu" and first.is_contiguous() and _is_like(first, args[1]):
            values = args[1].fetched(into=as_numpy(first.detach().as_subclass(Tensor)))
            return first if values.data_ptr() == first.data_ptr() else func(first, values)
        args, kwargs = tree_map(lambda x: x.fetched() if isinstance(x, SlicedTensor) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def cut(self, axis: int, first: int, size: int) -> SlicedTensor:
        axis %= len(self.whole)
        firsts, shape = list(self.firsts), list(self.shape)
        firsts[axis], shape[axis] = firsts[axis] + first, size
        return SlicedTensor(self.weights, self.called, self.whole, tuple(firsts), shape, self.dtype)

    def fetched(self, into: np.ndarray | None = None) -> Tensor:
        """Return the values, which may be read-only. `into`: see `WeightChannel.fetch`."""
        extents = list(zip(self.firsts, self.shape, strict=True))
        cut = sorted((size / of, axis) for axis, ((_, size), of) in enumerate(zip(extents, self.whole, strict=True)) if size != of)
        if not cut:
            return as_tensor(self.weights.read(TensorSlice.whole(self.called, self.whole), into))
        (_, axis), *others = cut
        wanted = TensorSlice.along(self.called, self.whole, axis, *extents[axis])
        values = as_tensor(self.weights.read(wanted, None if others else into))
        for _, other in others:
            values = values.narrow(other, *extents[other])
        return values


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def sliced_tensors(weights: PublishedVersion) -> Iterator[tuple[str, Tensor]]:
    for name, (shape, dtype) in weights.contents.items():
        kind = TYPE_OF.get(dtype.names[0]) if dtype.names else getattr(torch, dtype.name)
        yield name, SlicedTensor(weights, name, shape, (0,) * len(shape), shape, kind)
