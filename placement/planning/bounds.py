"""Lower bounds on the time and the cost of a rollout, over all partitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.planning.plan import Pool
from placement.planning.workload import ActorType, RolloutWorkload
from placement.speed.decode_speed import Speed

CLOSE = 1e-9  # relative width of the time interval at which bisection stops


@dataclass(frozen=True)
class Bounds:
    """Least time and least cost of any plan, each by itself.

    `reason` names the argument behind `time_s`: "longest response alone", "work over actors" or "filling".

    Examples
    --------
    >>> rollout_bounds(np.array([100, 60, 50]), Speed(base_s=0.01, per_seq_s=0.001), max_actors=2)
    Bounds(time_s=1.1, cost=1.21, reason='longest response alone')
    """

    time_s: float
    cost: float
    reason: str = ""


def rollout_bounds(
    lengths: np.ndarray,
    speed: Speed | None = None,
    max_actors: int | None = None,
    *,
    capacity: int | None = None,
    price: float = 1.0,
    pools: Sequence[Pool] | None = None,
    prompts: np.ndarray | float | None = None,
    transfer_s: float = 0.0,
) -> Bounds:
    """Compute lower bounds on time and cost. The arguments are those of `frontier`.

    With scenarios (n, S) the result is the mean of the columns' bounds, which bounds the mean.

    Returns
    -------
    Bounds
        For one pool, `time_s` is the largest of three bounds: the longest response alone, all work shared evenly by all
        actors, and filling. For several pools it is the larger of the first two, with the best pool for every term.
        `cost` is that of everything on one actor of the cheapest pool.

    Raises
    ------
    ValueError
        As `frontier` does.

    Notes
    -----
    Filling: order a plan's groups by their longest sequence, M₁ ≥ M₂ ≥ …. All sequences longer than M_g are in the
    first g - 1 groups, which hold at most Σ (T - setup - base · M_h) of work. Filling actors from the longest sequence
    down with fractions of sequences starts every group at least as late. If that does not place everything within T,
    nothing does.

    Cost with a capacity C: waves cannot be fewer, and their maxima not lower, than if sequences were cut to fill caches
    exactly. That gives base · Σ over g of the length at which g·C tokens are passed.

    Examples
    --------
    >>> from placement import Speed
    >>> rollout_bounds([900, 80, 75], Speed(0.01, 1e-4), 2)
    Bounds(time_s=9.09, cost=9.1055, reason='longest response alone')
    """
    work = RolloutWorkload.from_arguments(
        lengths, speed, max_actors=max_actors, capacity=capacity, price=price, pools=pools, prompts=prompts, transfer_s=transfer_s
    )
    each = [_column(work, s) for s in range(work.lengths.shape[1])]
    reasons = [bounds.reason for bounds in each]
    return Bounds(
        float(np.mean([bounds.time_s for bounds in each])),
        float(np.mean([bounds.cost for bounds in each])),
        max(sorted(set(reasons)), key=reasons.count),
    )


class CostBound:
    """The filling argument for one kind of actor: fill actors with fractions of sequences, longest first."""

    def __init__(self, work: RolloutWorkload, column: int, kind: ActorType) -> None:
        lengths = work.lengths[:, column]
        order = np.argsort(-lengths, kind="stable")
        self.kind, self.lengths = kind, lengths[order]
        own_s = kind.work_s(self.lengths, work.prompts[order])
        self.longest_s = float((kind.setup_s + kind.base_s * self.lengths + own_s).max())
        self.done_s = np.concatenate(([0.0], np.cumsum(own_s)))

    def cost(self, time_s: float) -> float:
        """Return the least cost within `time_s`, or infinity if sequences are left over."""
        kind, total = self.kind, float(self.done_s[-1])
        if time_s < self.longest_s * (1 - CLOSE):
            return math.inf
        time_s *= 1 + CLOSE  # a bound must not lose to a plan by rounding
        placed, spent = 0.0, total
        for _ in range(kind.max_actors):
            first = min(int(np.searchsorted(self.done_s, placed, side="right")) - 1, len(self.lengths) - 1)
            opened = kind.setup_s + kind.base_s * self.lengths[first]
            spent += opened
            placed += time_s - opened
            if placed >= total:
                return kind.price * spent
            if time_s <= opened:
                return math.inf
        return math.inf

    def time_s(self) -> float:
        """Return the least time in which everything can be placed."""
        kind = self.kind
        high = kind.setup_s + kind.base_s * float(self.lengths[0]) + float(self.done_s[-1])
        low = max(self.longest_s, kind.setup_s + (high - kind.setup_s) / kind.max_actors)
        if math.isfinite(self.cost(low)):
            return low
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            if math.isfinite(self.cost(middle)):
                high = middle
            else:
                low = middle
        return low


def _column(work: RolloutWorkload, column: int) -> Bounds:
    lengths, kinds = work.lengths[:, column], work.kinds
    own_s = np.array([kind.work_s(lengths, work.prompts) for kind in kinds])  # (kinds, n)
    opened = np.array([kind.setup_s + kind.base_s * lengths for kind in kinds])
    alone_s = float((opened + own_s).min(0).max())
    least_base = min(kind.setup_s for kind in kinds) + min(kind.base_s for kind in kinds) * float(lengths.max())
    shared_s = (least_base + float(own_s.min(0).sum())) / sum(kind.max_actors for kind in kinds)
    time_s, reason = max((alone_s, "longest response alone"), (shared_s, "work over actors"))
    if len(kinds) == 1:
        filled_s = CostBound(work, column, kinds[0]).time_s()
        if filled_s > time_s * (1 + 10 * CLOSE):
            time_s, reason = filled_s, "filling"
    price = np.array([kind.price for kind in kinds])
    cost = float((price[:, None] * own_s).min(0).sum()) + min(kind.price * kind.setup_s for kind in kinds)
    return Bounds(time_s, cost + min(kind.price * kind.base_s for kind in kinds) * _maxima(work, column), reason)


def _maxima(work: RolloutWorkload, column: int) -> float:
    """Return the least sum of wave maxima in tokens: one wave, or as many as the largest cache needs."""
    lengths = work.lengths[:, column]
    capacity = max(kind.capacity for kind in work.kinds)
    if math.isinf(capacity):
        return float(lengths.max())
    order = np.argsort(-lengths, kind="stable")
    done = np.cumsum((work.prompts + lengths)[order])
    passed = np.arange(0, done[-1] * (1 - 1e-12), capacity)
    return float(lengths[order][np.searchsorted(done, passed, side="right")].sum())
