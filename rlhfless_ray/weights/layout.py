"""Layouts of tensors over ranks, as pure functions: intervals of flattened tensors, and whole tensors by rank.

An interval is (start, end) in elements of a tensor that is flattened in C order. A layout gives each rank its intervals of each
tensor. Ranks may hold the same elements, and a rank may hold none of a tensor.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping

Interval = tuple[int, int]


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
