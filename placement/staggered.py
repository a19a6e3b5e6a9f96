"""Rollouts whose actors end one after the other on purpose, so that what follows a response can begin early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from placement.frontier import Fill
from placement.workload import Workload

TIMES = 12  # bounds on the whole rollout that are tried at most
SHARES = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1)  # of that bound, by which all but the first actors end
RATIOS = (0.95, 0.9, 0.8, 0.7, 0.5)  # of each actor's bound to the one's before


def staggered(work: Workload, outside: int, times: Sequence[float]) -> list[list[np.ndarray]]:
    """Groups of plans on one pool, known lengths or the means of scenarios, filled greedily from the longest sequence down
    with a bound of its own for every actor: the first few end by one of `times` and the others by a share of it, or each
    ends by a share of the bound before it. `outside`: actors that may sit beside the learner gang."""
    kind = work.kinds[0]
    mean = work.lengths.mean(1)
    order = np.argsort(-mean, kind="stable")
    fill = Fill(mean[order], kind.work_s(mean, work.prompts)[order], (work.prompts + work.lengths.max(1))[order], kind)
    some = sorted({*np.linspace(0, len(times) - 1, TIMES).astype(int).tolist()}) if len(times) else []
    seen: set[tuple[int, ...]] = set()
    for time_s in [times[i] for i in some]:
        for bounds in _bounds(time_s, outside, kind.max_actors):
            cuts = fill.cuts_each(bounds)
            if cuts is not None:
                seen.add(tuple(cuts))
    return [[order[a:b] for a, b in itertools.pairwise(cuts)] for cuts in sorted(seen)]


def _bounds(time_s: float, outside: int, actors: int) -> Iterator[list[float]]:
    firsts = sorted({1, 2, outside // 4, outside // 2, outside, actors // 2} & set(range(1, actors)))
    for first in firsts:
        for share in SHARES:
            yield [time_s] * first + [share * time_s] * (actors - first)
    for ratio in RATIOS:
        yield [time_s * ratio**a for a in range(actors)]
