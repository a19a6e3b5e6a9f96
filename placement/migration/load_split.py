"""Splits of the live sequences over actors, judged by expected time and cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from placement.forecast.remaining_length import RemainingLengths

FLOORS = (0.1, 0.5)  # shares of the criticality that are spread evenly over all sequences
RATIOS = (2.0, 4.0, 8.0, 16.0)  # largest over smallest load
COUNTS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)  # multiples of the square-root law's number of actors
CLOCK = np.linspace(0, 1, 41)[1:] ** 1.5
SQUARE_ROOT = 0.5  # lease exponent where moves cost something, as in the square-root law


@dataclass(frozen=True)
class SplitEstimate:
    """Expected remaining seconds, and actor-seconds above the decoding work itself. score = time_s + cost_weight · cost."""

    time_s: float
    cost: float
    score: float


def estimate_split(
    alive: np.ndarray, tokens: np.ndarray, base_s: float, per_seq_s: float, cost_weight: float, lease_exponent: float = 1.0
) -> SplitEstimate:
    """Estimate a single split: `estimate_splits` for its rows (m, G+1)."""
    time_s, cost = estimate_splits(alive, np.zeros(1, int), tokens, base_s, per_seq_s, lease_exponent)
    return SplitEstimate(float(time_s[0]), float(cost[0]), float(time_s[0] + cost_weight * cost[0]))


def estimate_splits(
    alive: np.ndarray, first: np.ndarray, tokens: np.ndarray, base_s: float, per_seq_s: float, lease_exponent: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate (time_s, cost) of K splits, (K,) each.

    alive (R, G+1): expected survivors of each actor's group now and after `tokens` (G,). The groups of one split follow
    those of another; split k begins at row first[k].

    A group is assumed to decode together while it shrinks. It gives up its lease as the power `lease_exponent` of its
    survivors, because what is left of it merges with others. Only the lease of the group expected to last longest, into
    which the others merge, is held until its end. If that one were charged by survivors too, a single actor would look
    cheaper than it can be: up to 8 % of time was lost so at the cheap end of the frontier on log-normal lengths.

    Time is the expectation of the latest end over all actors. Of n members with s expected survivors all have ended
    with probability (1 - s/n)^n, as if all were alike.
    """
    width = _steps(tokens)
    split = np.zeros(len(alive), int)
    split[first[1:]] = 1
    split = np.cumsum(split)
    now = alive[:, :1]
    middle = (alive[:, 1:] + alive[:, :-1]) / 2
    clock = np.zeros_like(alive)
    np.cumsum((base_s + per_seq_s * np.maximum(1.0, middle)) * width, axis=1, out=clock[:, 1:])
    held = np.sum(np.minimum(np.maximum(middle / now, 0.0) ** lease_exponent, middle) * width, axis=1)
    any_left = np.sum(np.minimum(1.0, middle) * width, axis=1)
    lasts = np.flatnonzero(any_left == np.maximum.reduceat(any_left, first)[split])
    longest = lasts[np.unique(split[lasts], return_index=True)[1]]
    held[longest] = any_left[longest]
    cost = base_s * np.add.reduceat(held, first)
    end = np.maximum.reduceat(clock[:, -1], first)
    at = CLOCK * end[:, None]
    # A single interpolation serves all groups: each group's clock is shifted past the end of the one before.
    shift = (1.0 + end.max()) * np.arange(len(alive))[:, None]
    mine = at[split]
    left = np.interp((mine + shift).ravel(), (clock + shift).ravel(), alive.ravel()).reshape(len(alive), -1)
    left[mine > clock[:, -1:]] = 0.0
    late = np.add.reduceat(now * np.log1p(-np.minimum(left / now, 1 - 1e-12)), first, axis=0)
    return np.sum((1 - np.exp(late)) * _steps(at), axis=1), cost


def _steps(values: np.ndarray) -> np.ndarray:
    """Return the differences along the last axis, the first from 0. `np.diff` takes several times as long for few values."""
    steps = values.copy()
    steps[..., 1:] -= values[..., :-1]
    return steps


@dataclass(frozen=True)
class Split:
    """Group of each live sequence (n,), 0 the most critical, and the split's estimate."""

    group: np.ndarray
    groups: int
    estimate: SplitEstimate


def best_split(
    view: RemainingLengths,
    base_s: float,
    per_seq_s: float,
    cost_weight: float,
    max_actors: int,
    *,
    opened: int = 0,
    start_s: float = 0.0,
    lease_exponent: float = 1.0,
) -> Split:
    """Find the best of a family of splits of the sequences in order of criticality.

    If sequence i ends last with probability p, the loads that minimise expected time + cost_weight · cost are
    sqrt(cost_weight·base / (per_seq·p)): the square-root law of consolidation, sequence by sequence. It is tried with
    part of the criticality spread evenly (FLOORS), next to loads that grow geometrically (RATIOS), each for several
    numbers of actors (COUNTS). Even loads are included, so that no forecast makes the result worse than consolidation
    in expectation.

    opened: actors already leased. Each further one costs start_s seconds of lease, and delays what starts on it.
    lease_exponent: see `estimate_splits`.
    """
    n = len(view.critical)
    order = np.argsort(-view.critical, kind="stable")
    sums = np.zeros((n + 1, len(view.tokens)))
    np.cumsum(view.alive[order], axis=0, out=sums[1:])
    critical = view.critical[order]
    law_actors = float(np.sqrt(per_seq_s * n / (cost_weight * base_s))) if base_s > 0 else float(n)
    most = min(max_actors, n)
    shapes: list[tuple[np.ndarray | float, float]] = [(1.0, law_actors)]
    for floor in FLOORS:
        root = np.cumsum(np.sqrt((1 - floor) * critical + floor / n))
        shapes.append((root / root[-1], law_actors * root[-1] / np.sqrt(n)))
    shapes += [(ratio, law_actors) for ratio in RATIOS]
    tried: list[np.ndarray] = []
    for shape, law in shapes:
        for m in sorted({min(max(round(law * count), 1), most) for count in COUNTS}):
            if m > 1 or not tried:  # one group is the same by every shape
                tried.append(_cuts(shape, m, n) if isinstance(shape, np.ndarray) else _geometric_cuts(shape, m, n))
    groups = np.array([len(cuts) - 1 for cuts in tried])
    begin, end = (np.concatenate([cuts[part] for cuts in tried]) for part in (slice(None, -1), slice(1, None)))
    alive = np.concatenate([(end - begin)[:, None].astype(float), sums[end] - sums[begin]], 1)
    time_s, cost = estimate_splits(alive, np.cumsum(groups) - groups, view.tokens, base_s, per_seq_s, lease_exponent)
    score = time_s + cost_weight * cost
    best = int(np.argmin(score + np.maximum(0, groups - opened) * start_s * (cost_weight + 1 / groups)))
    group = np.empty(n, int)
    group[order] = np.searchsorted(tried[best][1:], np.arange(n), side="right")
    return Split(group, int(groups[best]), SplitEstimate(float(time_s[best]), float(cost[best]), float(score[best])))


def even_split(view: RemainingLengths, base_s: float, per_seq_s: float, cost_weight: float, max_actors: int) -> Split:
    """Split as consolidation does without forecasts: evenly, in the given order, over the square-root law's number of actors."""
    n = len(view.critical)
    law_actors = np.sqrt(per_seq_s * n / (cost_weight * base_s)) if base_s > 0 else n
    actors = int(np.clip(np.ceil(law_actors), 1, min(max_actors, n)))
    size = n // actors + (np.arange(actors) < n % actors)
    group = np.repeat(np.arange(actors), size)
    alive = np.concatenate([size[:, None].astype(float), np.add.reduceat(view.alive, np.cumsum(size) - size, axis=0)], 1)
    return Split(group, actors, estimate_split(alive, view.tokens, base_s, per_seq_s, cost_weight))


def _cuts(shape: np.ndarray, m: int, n: int) -> np.ndarray:
    return np.unique(np.concatenate([[0], np.searchsorted(shape, np.arange(1, m) / m), [n]]))


@lru_cache(maxsize=4096)  # the same numbers of actors and sequences come again and again
def _geometric_cuts(ratio: float, m: int, n: int) -> np.ndarray:
    share = np.geomspace(1, ratio, m)
    inner = np.round(np.cumsum(share / share.sum()) * n).astype(int)[:-1]
    return np.unique(np.concatenate([[0], inner, [n]]))
