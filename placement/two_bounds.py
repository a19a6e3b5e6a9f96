"""Rollouts in which some actors end early, so that the devices under them can do something else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from placement.frontier import Fill
from placement.plan import Plan
from placement.workload import Workload

TIMES = 40  # time bounds tried at most
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)  # of the time bound, by which the early actors end


def early_gang(work: Workload, outside: int, times: Sequence[float]) -> list[Plan]:
    """Plans on one pool whose first `outside` actors, with the longest sequences, end by one of `times`, and all others by
    a share of it. Filled greedily from the longest down, which costs least for these bounds as it does for one bound;
    scenarios are filled by their means and timed as they are."""
    kind = work.kinds[0]
    if outside >= kind.max_actors:
        return []  # nobody works on the gang's slots anyway
    mean = work.lengths.mean(1)
    order = np.argsort(-mean, kind="stable")
    fill = Fill(mean[order], kind.work_s(mean, work.prompts)[order], (work.prompts + work.lengths.max(1))[order], kind)
    seen: set[tuple[int, ...]] = set()
    plans: list[Plan] = []
    for time_s in [times[i] for i in sorted({*np.linspace(0, len(times) - 1, TIMES).astype(int).tolist()})] if times else []:
        for share in SHARES:
            cuts = fill.cuts(time_s, outside, share * time_s)
            if cuts is None:
                break  # an earlier end takes more actors still
            if tuple(cuts) not in seen:
                seen.add(tuple(cuts))
                groups = [order[a:b] for a, b in itertools.pairwise(cuts)]
                plans.append(Plan(*work.evaluate(groups, (0,) * len(groups)), tuple(groups), (0,) * len(groups)))
    return plans
