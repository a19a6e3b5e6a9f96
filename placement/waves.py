"""Plans for more sequences than the caches of all actors hold at once: actors work through them in waves."""

from __future__ import annotations

import numpy as np

from placement.partition import Partition
from placement.workload import Workload

SIZES = 24  # wave sizes tried, from what the caches hold down


def in_waves(work: Workload) -> list[Partition]:
    """Contiguous waves that each fit a cache, dealt to actors: the longest first, each to the actor that would end first.

    A wave's time is base · its longest + its work; an actor's is the sum over its waves and one start. Waves that fill the
    cache cost least (fewest maxima); smaller ones balance better, so several sizes are tried. A heuristic: the order within
    a real engine is its own, and it admits the next sequence as soon as one ends, so real times are rather below these.
    """
    lengths = work.lengths
    order = np.argsort(-lengths.mean(1), kind="stable")
    held = work.held_tokens()[order]
    kinds = work.kinds
    slots = [q for q, kind in enumerate(kinds) for _ in range(kind.max_actors)]
    capacity = min(kind.capacity for kind in kinds if kind.capacity >= held.max())
    slots = [q for q in slots if kinds[q].capacity >= capacity]
    total = held.max(1).sum()
    found = []
    for share in np.geomspace(1.0, max(held.max() / capacity, min(1.0, total / capacity / (8 * len(slots)))), SIZES):
        waves = _cut(held, max(share * capacity, held.max()))
        loads = np.zeros((len(slots), lengths.shape[1]))
        members: list[list[np.ndarray]] = [[] for _ in slots]
        for a, b in waves:
            rows = order[a:b]
            ends = []
            for slot, q in enumerate(slots):
                kind = kinds[q]
                seconds = kind.base_s * lengths[rows].max(0) + kind.work_s(lengths[rows], work.prompts[rows][:, None]).sum(0)
                ends.append(seconds + loads[slot] + (0.0 if members[slot] else kind.over_s))
            first = int(np.argmin([end.mean() for end in ends]))
            loads[first] = ends[first]
            members[first].append(rows)
        used = [slot for slot, rows in enumerate(members) if rows]
        groups = [np.concatenate(members[slot]) for slot in used]
        pools = [slots[slot] for slot in used]
        found.append(Partition.of_groups(*work.evaluate(groups, pools), groups, pools))
    return found


def _cut(held: np.ndarray, capacity: float) -> list[tuple[int, int]]:
    """Ranges of rows whose sums over `held` (n, S) stay within capacity in every column, each as long as can be."""
    tokens = np.vstack([np.zeros(held.shape[1]), np.cumsum(held, axis=0)])
    ranges, i = [], 0
    while i < len(held):
        end = min(int(np.searchsorted(tokens[:, s], tokens[i, s] + capacity * (1 + 1e-12), side="right")) - 1
                  for s in range(held.shape[1]))
        ranges.append((i, max(end, i + 1)))
        i = ranges[-1][1]
    return ranges
