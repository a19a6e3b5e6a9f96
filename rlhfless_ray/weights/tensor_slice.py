"""Pieces of weights: which elements of which tensor a piece has, and reads of any piece from those that are held."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rlhfless_ray.weights.layout import Interval

Block = tuple[Interval, Interval]  # rows and columns of a tensor that is seen as a matrix
Place = tuple[Interval, Block, Block]  # consecutive values of a slice, the block that they are, and the part of it that is meant
Slices = Mapping["TensorSlice", np.ndarray]  # values of pieces, each flattened in C order
UNKNOWN = (-1,)  # the shape of a tensor of which only intervals are known


@dataclass(frozen=True)
class TensorSlice:
    """Elements `start` to `end`, in C order, of a tensor of this shape, or of its `size` indices along `axis`, from `first` on.

    Indices along the first axis are consecutive elements of the tensor, so they are written as `start` and `end` with `axis` 0.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    end: int
    axis: int = 0
    first: int = 0
    size: int = 0

    @classmethod
    def whole(cls, name: str, shape: Iterable[int]) -> TensorSlice:
        sizes = tuple(shape)
        return cls(name, sizes, 0, math.prod(sizes))

    @classmethod
    def along(cls, name: str, shape: Iterable[int], axis: int, first: int, size: int) -> TensorSlice:
        """Return these indices along an axis."""
        sizes = tuple(shape)
        inner = math.prod(sizes[axis + 1 :])
        if axis == 0:
            return cls(name, sizes, first * inner, (first + size) * inner)
        return cls(name, sizes, 0, math.prod(sizes[:axis]) * size * inner, axis, first, size)

    @property
    def is_flat(self) -> bool:
        """Whether the elements are consecutive in the whole tensor."""
        return self.axis == 0

    @property
    def values_shape(self) -> tuple[int, ...]:
        """The shape of the values. It is flat if they are not all of some indices along one axis."""
        count = self.end - self.start
        if self.is_flat:
            inner = math.prod(self.shape[1:])
            has_rows = self.shape not in ((), UNKNOWN) and inner and not (self.start % inner or count % inner)
            return (count // inner, *self.shape[1:]) if has_rows else self.shape if self.shape == () else (count,)
        shape = (*self.shape[: self.axis], self.size, *self.shape[self.axis + 1 :])
        return shape if count == math.prod(shape) else (count,)

    def __str__(self) -> str:
        if self == TensorSlice.whole(self.name, self.shape):
            return self.name
        cut = "" if self.is_flat else f"axis {self.axis}, {self.first}:{self.first + self.size}, "
        return f"{self.name}[{cut}{self.start}:{self.end}]"

    def part(self, start: int, end: int) -> TensorSlice:
        """Return elements `start` to `end` of this slice."""
        return replace(self, start=self.start + start, end=self.start + end)

    def blocks(self, axis: int) -> Iterator[tuple[Interval, Block]]:
        """Yield where the values lie in the whole tensor, seen as a matrix whose rows consist of `axis` and the axes after it.

        Yields (interval of the values, (rows, columns)). There are at most three: rows between two partial rows are complete.
        """
        inner = math.prod(self.shape[axis + 1 :])
        first, size = (0, self.shape[axis] if self.shape else 1) if self.is_flat else (self.first, self.size)
        width, at = size * inner, self.start
        while at < self.end:
            row, column = divmod(at, width)
            rows = max(1, (self.end - at) // width) if column == 0 else 1
            last = min(width, column + self.end - at) if rows == 1 else width
            done, count = at - self.start, rows * (last - column)
            yield (done, done + count), ((row, row + rows), (first * inner + column, first * inner + last))
            at += count


def whole_slices(arrays: Mapping[str, np.ndarray]) -> dict[TensorSlice, np.ndarray]:
    """Return whole tensors as slices."""
    return {TensorSlice.whole(name, array.shape): array.reshape(-1) for name, array in arrays.items()}


def slice_called(text: str, shapes: Mapping[str, tuple[int, ...]]) -> TensorSlice | None:
    """Return the slice of consecutive elements that str() has written so, or None if its tensor is unknown. `shapes`: by tensor name."""
    if text in shapes:
        return TensorSlice.whole(text, shapes[text])
    found = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", text)
    return TensorSlice(found[1], shapes[found[1]], int(found[2]), int(found[3])) if found and found[1] in shapes else None


Held = list[tuple["TensorSlice", Callable[[], np.ndarray]]]


class HeldSlices(Mapping[str, np.ndarray]):
    """Pieces that together are whole tensors. Reads are views of a piece if possible.

    As a mapping, it has the whole tensors by name. One in several pieces is put together each time it is read, so that a reader which
    takes one tensor after the other never holds a copy of all. Reading raises ValueError if elements are in no piece.
    """

    def __init__(self, held: Iterable[tuple[TensorSlice, Callable[[], np.ndarray]]]) -> None:
        """`held`: pieces, and what returns their flat values when they are read."""
        self.held: dict[str, Held] = {}
        for piece, load in held:
            self.held.setdefault(piece.name, []).append((piece, load))

    @classmethod
    def of(cls, *parts: Slices) -> HeldSlices:
        return cls((piece, partial(part.__getitem__, piece)) for part in parts for piece in part)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(TensorSlice.whole(name, self._shape(name)))

    def __contains__(self, name: object) -> bool:
        return name in self.held  # a mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def content(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and type of a tensor."""
        return self._shape(name), self.held[name][0][1]().dtype

    def elements(self, name: str) -> int:
        return math.prod(self._shape(name))

    def _shape(self, name: str, wanted: tuple[int, ...] = UNKNOWN) -> tuple[int, ...]:
        """Return a tensor's shape. It is flat if no piece tells it. Raises ValueError if pieces are of different shapes."""
        shapes = {wanted, *(piece.shape for piece, _ in self.held[name])} - {UNKNOWN}
        if len(shapes) > 1:
            raise ValueError(f"{name}: pieces are of tensors of different shapes: {', '.join(map(str, sorted(shapes)))}")
        return shapes.pop() if shapes else (max(piece.end for piece, _ in self.held[name]),)

    def read(self, wanted: TensorSlice, into: np.ndarray | None = None) -> np.ndarray:
        """Return the values of any slice. Raises KeyError if its tensor is unknown, or ValueError if elements are in no piece.

        `into`: a contiguous array that takes them, instead of a new one where several pieces have some.
        """
        shape, own_shape = self._shape(wanted.name, wanted.shape), wanted.values_shape
        wanted = replace(wanted, shape=shape)
        held = [(replace(piece, shape=shape), load) for piece, load in self.held[wanted.name]]
        if all(is_comparable(wanted, piece) for piece, _ in held):
            found = [(into, at(load(), of)) for piece, load in held for into, of in overlaps(wanted, piece)]
            return joined(wanted, found, into).reshape(own_shape)
        whole = TensorSlice.whole(wanted.name, shape)
        return HeldSlices.of({whole: HeldSlices.read(self, whole).reshape(-1)}).read(wanted).reshape(own_shape)


@dataclass(frozen=True)
class FormerRank:
    """What a process held as a rank of an earlier layout.

    Attributes:
        whole: tensors that it still has, all of each.
        pieces: all that it had, also what is in its file only.
        file: name of its file of the state.
    """

    whole: HeldSlices
    pieces: tuple[TensorSlice, ...]
    file: str


NOTHING = FormerRank(HeldSlices(()), (), "")


class ReshardedSlices(HeldSlices):
    """The slices of a state whose ranks change, as a process reads them that was a rank before. It takes its own first.

    `fetched_bytes`: read from others' pieces. `lacked_bytes`: of what was read, and the process did not have, which is the least that it
    could fetch.
    """

    def __init__(self, own: HeldSlices, others: HeldSlices, former: FormerRank) -> None:
        """`own`, `others`: the slices in the file of this process, and in those of the other ranks."""
        super().__init__(())
        self.held = {name: [*own.held.get(name, ()), *others.held.get(name, ())] for name in {**own.held, **others.held}}
        self.others, self.former = others, former
        self.pieces: dict[str, list[TensorSlice]] = {}
        for piece in former.pieces:
            self.pieces.setdefault(piece.name, []).append(piece)
        self.fetched_bytes = self.lacked_bytes = 0

    def read(self, wanted: TensorSlice, into: np.ndarray | None = None) -> np.ndarray:
        name, shape = wanted.name, self._shape(wanted.name, wanted.shape)
        wanted = replace(wanted, shape=shape)
        if name in self.former.whole:
            return self.former.whole.read(wanted, into)
        values = super().read(wanted, into)
        others = [replace(piece, shape=shape) for piece, _ in self.others.held.get(name, ())]
        had = [replace(piece, shape=shape) for piece in self.pieces.get(name, ())]
        self.fetched_bytes += values.itemsize * sum(shared_elements(wanted, piece) for piece in others)
        self.lacked_bytes += values.itemsize * max(0, values.size - sum(shared_elements(wanted, piece) for piece in had))
        return values


def shared_elements(wanted: TensorSlice, piece: TensorSlice) -> int:
    """Return how many elements of a piece are read for a slice: those that both have, or all where they cannot be compared."""
    if not is_comparable(wanted, piece):
        return piece.end - piece.start
    return sum((bottom - top) * (right - left) for (*_, ((top, bottom), (left, right))), _ in overlaps(wanted, piece))


def is_comparable(wanted: TensorSlice, piece: TensorSlice) -> bool:
    """Return whether `overlaps` can compare two slices. If both leave out indices along an axis, it must be the same axis."""
    return wanted.is_flat or piece.is_flat or wanted.axis == piece.axis


def overlaps(wanted: TensorSlice, piece: TensorSlice) -> Iterator[tuple[Place, Place]]:
    """Yield where the elements that two slices share are: (place in `wanted`, place in `piece`)."""
    axis = piece.axis if wanted.is_flat else wanted.axis
    for into, own in wanted.blocks(axis):
        for of, other in piece.blocks(axis):
            (top, bottom), (left, right) = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, other, strict=True))
            if top < bottom and left < right:
                yield (into, own, ((top, bottom), (left, right))), (of, other, ((top, bottom), (left, right)))


def at(values: np.ndarray, place: Place) -> np.ndarray:
    """Return the matrix of a slice's values at a place of `overlaps`, as a view."""
    interval, ((top, bottom), (left, _)), (rows, columns) = place
    return values[slice(*interval)].reshape(bottom - top, -1)[rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left]


def joined(wanted: TensorSlice, found: Sequence[tuple[Place, np.ndarray]], into: np.ndarray | None = None) -> np.ndarray:
    """Return a slice's values from the matrices at its places, a view of one if it is all. Raises ValueError if elements are missing.

    `into`: see `HeldSlices.read`.
    """
    size = wanted.end - wanted.start
    if lacking := size - sum(matrix.size for _, matrix in found):
        raise ValueError(f"{wanted}: {abs(lacking)} elements are in {'no part' if lacking > 0 else 'several parts'}")
    if len(found) < 2:
        return found[0][1] if found else np.zeros(0, np.float32)
    dtype = found[0][1].dtype
    values = np.empty(size, dtype) if into is None else into.reshape(-1)
    bits = values.view(f"u{dtype.itemsize}")  # numpy copies structures, such as bfloat16 is one, field by field
    for place, matrix in found:
        at(bits, place)[:] = matrix.view(bits.dtype)
    return values
