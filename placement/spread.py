"""Who shares an actor with whom from now on: splits of the live sequences, judged by expected time and cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.survival import Outlook

FLOORS = (0.1, 0.5)  # shares of the criticality that are spread evenly over everybody
RATIOS = (2.0, 4.0, 8.0, 16.0)  # largest over smallest load
COUNTS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)  # multiples of the square-root law's number of actors
CLOCK = np.linspace(0, 1, 41)[1:] ** 1.5
LAWFUL = 0.5  # leases are given up as this power of the survivors where moves cost something, as by the square-root law


@dataclass(frozen=True)
class Judged:
    """Expected remaining seconds and actor-seconds above the decoding work itself; score = time_s + μ·cost."""

    time_s: float
    cost: float
    score: float


def judge(
    alive: np.ndarray, tokens: np.ndarray, base_s: float, per_seq_s: float, mu: float, merging: float = 1.0
) -> Judged:
    """Expected outcome of one split: `judge_each` for its rows (m, G+1)."""
    time_s, cost = judge_each(alive, np.zeros(1, int), tokens, base_s, per_seq_s, merging)
    return Judged(float(time_s[0]), float(cost[0]), float(time_s[0] + mu * cost[0]))


def judge_each(
    alive: np.ndarray, first: np.ndarray, tokens: np.ndarray, base_s: float, per_seq_s: float, merging: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Expected (time_s, cost) of K splits, (K,) each. alive (R, G+1): expected survivors of each actor's group now and after
    `tokens` (G,), the groups of one split after those of another, which begins at row first[k].

    A group is taken to decode together while it shrinks, and to give up its lease as the power `merging` of its survivors,
    because what is left of it merges with others; only the lease of the group that will last longest, into which they
    merge, is held until its end. (Charging that lease by survivors too made one actor look cheaper than it can be, and lost
    up to 8 % of time at the cheap end of the frontier on log-normal lengths.) Time is the expectation of the latest end over
    all actors; of n members with s expected survivors all have ended with probability (1 - s/n)^n, as if all were alike.
    """
    width = np.diff(tokens, prepend=0.0)
    split = np.repeat(np.arange(len(first)), np.diff(np.r_[first, len(alive)]))
    now = alive[:, :1]
    middle = (alive[:, 1:] + alive[:, :-1]) / 2
    clock = np.zeros_like(alive)
    np.cumsum((base_s + per_seq_s * np.maximum(1.0, middle)) * width, axis=1, out=clock[:, 1:])
    held = np.sum(np.minimum(np.maximum(middle / now, 0.0) ** merging, middle) * width, axis=1)
    any_left = np.sum(np.minimum(1.0, middle) * width, axis=1)
    lasts = np.flatnonzero(any_left == np.maximum.reduceat(any_left, first)[split])
    longest = lasts[np.unique(split[lasts], return_index=True)[1]]
    held[longest] = any_left[longest]
    cost = base_s * np.add.reduceat(held, first)
    end = np.maximum.reduceat(clock[:, -1], first)
    at = CLOCK * end[:, None]
    # One interpolation for all groups: each group's clock is shifted past the end of the one before.
    shift = (1.0 + end.max()) * np.arange(len(alive))[:, None]
    mine = at[split]
    left = np.interp((mine + shift).ravel(), (clock + shift).ravel(), alive.ravel()).reshape(len(alive), -1)
    left[mine > clock[:, -1:]] = 0.0
    late = np.add.reduceat(now * np.log1p(-np.minimum(left / now, 1 - 1e-12)), first, axis=0)
    return np.sum((1 - np.exp(late)) * np.diff(at, prepend=0.0, axis=1), axis=1), cost


@dataclass(frozen=True)
class Split:
    """Group of each live sequence (n,), 0 the most critical; and what is expected of it."""

    group: np.ndarray
    groups: int
    judged: Judged


def best_split(
    view: Outlook, base_s: float, per_seq_s: float, mu: float, max_actors: int, *, opened: int = 0, start_s: float = 0.0,
    merging: float = 1.0,
) -> Split:
    """The best of a family of splits of the sequences in order of criticality.

    If sequence i is the last to end with probability p, the loads that minimise expected time + μ·cost are
    sqrt(μ·base / (per_seq·p)): the square-root law of consolidation, sequence by sequence. It is tried with part of the
    criticality spread evenly (FLOORS), and beside it loads that grow geometrically (RATIOS), each for several numbers of
    actors (COUNTS); even loads are among them, so that no forecast can make it worse than consolidation in expectation.
    opened: actors already leased; each one more costs start_s seconds of lease, and that delay to what starts on it.
    merging: see `judge_each`.
    """
    n = len(view.critical)
    order = np.argsort(-view.critical, kind="stable")
    sums = np.zeros((n + 1, len(view.tokens)))
    np.cumsum(view.alive[order], axis=0, out=sums[1:])
    critical = view.critical[order]
    lawful = float(np.sqrt(per_seq_s * n / (mu * base_s))) if base_s > 0 else float(n)
    most = min(max_actors, n)
    shapes: list[tuple[np.ndarray | float, float]] = [(1.0, lawful)]
    for floor in FLOORS:
        root = np.cumsum(np.sqrt((1 - floor) * critical + floor / n))
        shapes.append((root / root[-1], lawful * root[-1] / np.sqrt(n)))
    shapes += [(ratio, lawful) for ratio in RATIOS]
    tried: list[np.ndarray] = []
    for shape, law in shapes:
        for m in sorted({int(np.clip(round(law * count), 1, most)) for count in COUNTS}):
            if m == 1 and shape != 1.0 if isinstance(shape, float) else m == 1:
                continue  # one group is the same by every shape
            tried.append(_cuts(shape, m, n))
    groups = np.array([len(cuts) - 1 for cuts in tried])
    begin, end = (np.concatenate([cuts[part] for cuts in tried]) for part in (slice(None, -1), slice(1, None)))
    alive = np.concatenate([(end - begin)[:, None].astype(float), sums[end] - sums[begin]], 1)
    time_s, cost = judge_each(alive, np.cumsum(groups) - groups, view.tokens, base_s, per_seq_s, merging)
    score = time_s + mu * cost
    best = int(np.argmin(score + np.maximum(0, groups - opened) * start_s * (mu + 1 / groups)))
    group = np.empty(n, int)
    group[order] = np.searchsorted(tried[best][1:], np.arange(n), side="right")
    return Split(group, int(groups[best]), Judged(float(time_s[best]), float(cost[best]), float(score[best])))


def even_split(view: Outlook, base_s: float, per_seq_s: float, mu: float, max_actors: int) -> Split:
    """What consolidation does without forecasts: as many actors as the square-root law asks for, the sequences evenly on them in
    the order in which they come."""
    n = len(view.critical)
    lawful = np.sqrt(per_seq_s * n / (mu * base_s)) if base_s > 0 else n
    actors = int(np.clip(np.ceil(lawful), 1, min(max_actors, n)))
    size = n // actors + (np.arange(actors) < n % actors)
    group = np.repeat(np.arange(actors), size)
    alive = np.concatenate([size[:, None].astype(float), np.add.reduceat(view.alive, np.cumsum(size) - size, axis=0)], 1)
    return Split(group, actors, judge(alive, view.tokens, base_s, per_seq_s, mu))


def _cuts(shape: np.ndarray | float, m: int, n: int) -> np.ndarray:
    if isinstance(shape, np.ndarray):
        inner = np.searchsorted(shape, np.arange(1, m) / m)
    else:
        share = np.geomspace(1, shape, m)
        inner = np.round(np.cumsum(share / share.sum()) * n).astype(int)[:-1]
    return np.unique(np.r_[0, inner, n])
