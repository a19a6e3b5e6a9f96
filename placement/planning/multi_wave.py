"""Plans for more sequences than all caches hold at once: actors work through them in waves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.planning.partition import Partition, pareto
from placement.planning.workload import RolloutWorkload

SIZES = 12  # wave sizes tried, from a full cache downwards
SMALLEST = 8  # approximate number of waves per actor at the smallest size


def wave_partitions(work: RolloutWorkload) -> list[Partition]:
    """Plan contiguous waves that each fit a cache, and assign them longest first to the actor that would end first.

    A wave takes base · its longest sequence + its work. An actor takes the sum over its waves and one setup. Waves that
    fill the cache cost least (fewest maxima), smaller ones balance better, so several sizes are tried. This is a
    heuristic, and pessimistic: a real engine admits the next sequence as soon as one ends.
    """
    lengths, kinds = work.lengths, work.kinds
    order = np.argsort(-lengths.mean(1), kind="stable")
    held = work.held_tokens()[order]
    capacity = min(kind.capacity for kind in kinds if kind.capacity >= held.max())
    kind_of = np.array([q for q, kind in enumerate(kinds) for _ in range(kind.max_actors) if kind.capacity >= capacity])
    setup_s = np.array([kind.setup_s for kind in kinds])
    smallest = min(1.0, float(held.max(1).sum()) / (capacity * SMALLEST * len(kind_of)))
    found = []
    for share in np.geomspace(1.0, max(float(held.max()) / capacity, smallest), SIZES):
        starts = _starts(held, max(share * capacity, float(held.max())))
        longest = np.maximum.reduceat(lengths[order], starts[:-1], axis=0).mean(1)
        seconds = np.array(
            [kind.base_s * longest + np.add.reduceat(work.work_s(kind)[order], starts[:-1], axis=0).mean(1) for kind in kinds]
        )
        load = np.zeros(len(kind_of))
        members: list[list[np.ndarray]] = [[] for _ in kind_of]
        for wave in np.argsort(-seconds.min(0), kind="stable"):
            ends = np.where(load > 0, load, setup_s[kind_of]) + seconds[kind_of, wave]
            slot = int(ends.argmin())
            load[slot] = ends[slot]
            members[slot].append(order[starts[wave] : starts[wave + 1]])
        used = [slot for slot, waves in enumerate(members) if waves]
        groups = [np.concatenate(members[slot]) for slot in used]
        pools = [int(kind_of[slot]) for slot in used]
        cost = sum(kinds[kind_of[slot]].price * load[slot] for slot in used)
        found.append(Partition.from_groups(float(load.max()), float(cost), groups, pools))
    return [timed(work, point) for point in pareto(found)]


def timed(work: RolloutWorkload, point: Partition) -> Partition:
    """Recompute the figures over all scenarios, preemptions included. In each, waves start where that scenario fills the cache."""
    groups = np.split(point.order, point.cuts[1:-1])
    time_s, cost = work.evaluate(groups, point.pools)
    return replace(point, time_s=time_s, cost=cost)


def _starts(held: np.ndarray, capacity: float) -> np.ndarray:
    """Return where ranges of rows start, and the end.

    Each range is as long as possible while its sum over `held` (n, S) stays within capacity in every column.
    """
    tokens = np.vstack([np.zeros(held.shape[1]), np.cumsum(held, axis=0)])
    starts, ahead = [0], 16
    while starts[-1] < len(held):
        i = starts[-1]
        full = (tokens[i + 1 : i + 1 + ahead] - tokens[i]).max(1) > capacity
        if not full.any() and i + ahead < len(held):
            ahead *= 2
            continue
        starts.append(i + max(1, int(full.argmax()) if full.any() else len(full)))
        ahead = 2 * (starts[-1] - i) + 2
    return np.array(starts)
