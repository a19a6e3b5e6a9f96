"""The time/cost frontier of a rollout: the assignments of sequences to actors that no other beats on both axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from placement.planning.frontier_pools import with_spare
from placement.planning.frontier_small import PACKED, SMALL, SMALL_UNBOUNDED, all_partitions, best_fit
from placement.planning.greedy_fill import Ordered, sweep
from placement.planning.multi_wave import timed, wave_partitions
from placement.planning.partition import pareto
from placement.planning.plan import Plan, Pool
from placement.planning.scenario_plans import scenario_partitions
from placement.planning.workload import RolloutWorkload
from placement.speed.decode_speed import Speed


def frontier(
    lengths: np.ndarray,
    speed: Speed | None = None,
    *,
    max_actors: int | None = None,
    capacity: int | None = None,
    price: float = 1.0,
    pools: Sequence[Pool] | None = None,
    prompts: np.ndarray | float | None = None,
    transfer_s: float = 0.0,
    thin: float = 0.0,
) -> list[Plan]:
    """Find the plans that no other plan found beats on both time and cost.

    Parameters
    ----------
    lengths : array of shape (n,) or (n, S)
        Known response tokens, or S joint scenarios of them (one column is one draw). With scenarios, a plan's `time_s`
        is the mean over columns of the maximum over actors, and its `cost` the mean of the sum.
    speed, max_actors, capacity, price
        Short form of a single `Pool`.
    pools : sequence of Pool, optional
        General form. Give either `pools` or the short form.
    prompts : float or array of shape (n,), optional
        Prompt tokens. Default 0.
    transfer_s : float
        Seconds that every actor spends on weights or KV pages before it decodes, in addition to its pool's `start_s`.
        Both count in its time and its cost.
    thin : float
        Leave out plans that another one matches to this share on both axes (0.005: half a percent). The exact frontier
        of thousands of sequences has thousands of points. A thinned one is found faster.

    Returns
    -------
    list of Plan
        By time ascending and cost descending.

    Raises
    ------
    ValueError
        For lengths that are empty, not finite or not positive, for no actors, a sequence that no actor can hold, pools
        that cannot work, and arguments that contradict each other.

    Notes
    -----
    An actor takes setup + base · L₁ + Σ (per_seq · L + per_ctx · (p·L + L²/2)) seconds for sequences L₁ ≥ L₂ ≥ …
    admitted at once: the sum over decode steps of TailSieve's replica time with an affine step (see `Speed.rollout_s`).

    Exact for known lengths on one pool over groups that are contiguous in the sorted order. For a time bound T, filling
    actors from the longest sequence down starts every group as late as possible, so no contiguous partition has fewer
    actors or a smaller sum of group maxima. T sweeps down over every makespan. Exact over all partitions, on any pools,
    for up to SMALL sequences (`all_partitions`). Up to PACKED sequences, on one pool whose capacity does not bind,
    leftover time is packed as well (`best_fit`). Beyond that, contiguity cost 0.2 % at the worst point of a frontier,
    measured against `CostBound` (16 actors, 512 sequences, five draws of log-normal lengths). Several pools: see
    `frontier_pools`. Scenarios: see `scenario_plans`. Where actors may be preempted, times are expected ones
    (`RolloutWorkload.ends_s`), and short responses go there.

    Capacity: a group must hold its prompts and full responses at once (with scenarios, in every column). A second wave
    on the same actor costs as much as on an actor of its own and ends later. Waves are therefore planned only if
    `max_actors` cannot hold everything at once (see `multi_wave`). Such plans are not claimed to be exact.

    Examples
    --------
    >>> plans = frontier([120, 80, 75, 900], Speed(base_s=0.01, per_seq_s=1e-4), max_actors=4)
    >>> [(round(plan.time_s, 2), round(plan.cost, 2)) for plan in plans]
    [(9.09, 10.32), (9.1, 9.92), (9.11, 9.87), (9.12, 9.12)]
    """
    work = RolloutWorkload.from_arguments(
        lengths, speed, max_actors=max_actors, capacity=capacity, price=price, pools=pools, prompts=prompts, transfer_s=transfer_s
    )
    if not (math.isfinite(thin) and 0 <= thin < 1):
        raise ValueError(f"thin is a share of at least 0 and below 1, got {thin}")
    if not work.known:
        return scenario_partitions(work, thin)
    n, on_one_type = len(work.lengths), len(work.kinds) == 1
    exact = n <= (PACKED if on_one_type else SMALL)  # few enough sequences to thin only at the end
    share = 0.0 if exact else thin
    ordered = Ordered.of_known(work)
    found = sweep(ordered, work.kinds[0], share) if on_one_type else with_spare(ordered, work.kinds, share)
    if SMALL < n <= PACKED and on_one_type and work.held_tokens().sum() <= work.kinds[0].capacity:
        found = [*found, *best_fit(work, found)]
    if work.is_risky:
        found = [timed(work, point) for point in found]
    if n <= (SMALL if found else SMALL_UNBOUNDED):
        found = [*found, *all_partitions(work, pareto(found))]
    # A thinned sweep's bounds are already `thin` apart: thinning again could leave gaps twice as wide.
    return [point.plan() for point in pareto(found or wave_partitions(work), thin if exact else 0.0)]
