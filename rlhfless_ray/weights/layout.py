"""Layouts of tensors over ranks, as pure functions: intervals of flattened tensors, and whole tensors by rank.

An interval is (start, end) in elements of a tensor that is flattened in C order. A layout gives each rank its intervals of each
tensor. Ranks may hold the same elements, and a rank may hold none of a tensor. With tensor parallelism a rank's tensor is a `Cut` of
the whole one, and intervals are those of the cut.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
Block = tuple[Interval, Interval]


@dataclass(frozen=True)
class Cut:
    """Part of a tensor of this shape: `size` indices along one axis, from `first` on."""

    shape: tuple[int, ...]
    axis: int
    first: int
    size: int

    @property
    def row(self) -> Interval:
        """The interval of its elements in a row. A row consists of this axis and the axes after it."""
        inner = math.prod(self.shape[self.axis + 1 :])
        return self.first * inner, (self.first + self.size) * inner

    @property
    def row_elements(self) -> int:
        """Number of elements in a row of the whole tensor."""
        return math.prod(self.shape[self.axis :])

    def blocks(self, interval: Interval) -> Iterator[tuple[Interval, Block]]:
        """Yield the places of an interval of the flattened cut in the whole tensor, which is seen as a matrix of rows.

        Yields (interval within the given one, (rows, columns)). There are at most three: rows between two partial rows are complete.
        """
        first, end = self.row
        width, (at, stop), done = end - first, interval, 0
        while at < stop:
            row, column = divmod(at, width)
            rows = max(1, (stop - at) // width) if column == 0 else 1
            last = min(width, column + stop - at) if rows == 1 else width
            count = rows * (last - column)
            yield (done, done + count), ((row, row + rows), (first + column, first + last))
            at, done = at + count, done + count


def even_share(elements: int, ranks: int, rank: int) -> Interval:
    """Return a rank's interval of a tensor that is divided among all ranks, in sizes that differ by at most one element."""
    return elements * rank // ranks, elements * (rank + 1) // ranks


def padded_share(elements: int, ranks: int, rank: int) -> Interval:
    """Return a rank's interval of a tensor as ZeRO 3 divides it: in equal parts, of which the last ones are shorter or empty."""
    size = -(-elements // ranks)
    return min(rank * size, elements), min((rank + 1) * size, elements)


def whole_tensors(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign whole tensors to ranks so that the largest load is small: the largest tensor first, to the rank with the least.

    Args:
        sizes: {tensor name: size}, in any unit.

    Returns: {tensor name: rank}, the same in every process.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], rank))
        owner[name] = rank
    return owner


def whole_layers(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign whole tensors to ranks as `whole_tensors` does, but all tensors of a layer, and all outside of layers, to one rank.

    What is computed from several tensors of a layer, such as weights with merged adapters, then needs one rank only.
    """
    layer_of = {name: match[1] if (match := re.match(r"(.*?\.\d+)\.", name)) else "" for name in sizes}
    layers = dict.fromkeys(layer_of.values(), 0)
    for name, layer in layer_of.items():
        layers[layer] += sizes[name]
    owner = whole_tensors(layers, ranks)
    return {name: owner[layer] for name, layer in layer_of.items()}


def pieces(needed: Interval, held: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """Return the intervals to read from each holder so that the needed interval is complete and no element is read twice.

    Args:
        needed: the interval to read.
        held: the holders' intervals. They may overlap.

    Returns: (index in `held`, interval), in order. Raises ValueError if an element has no holder.
    """
    intervals, at = [], needed[0]
    while at < needed[1]:
        reach, holder = max(((end, index) for index, (start, end) in enumerate(held) if start <= at), default=(at, -1))
        if reach <= at:
            raise ValueError(f"elements {at} to {min((s for s, _ in held if s > at), default=needed[1])} are in no part")
        end = min(reach, needed[1])
        intervals.append((holder, (at, end)))
        at = end
    return intervals
