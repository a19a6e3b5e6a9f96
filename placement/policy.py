"""Decisions as values, each with its reason. The pools act on them; nothing here does."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from placement.speed import Speed


@dataclass(frozen=True)
class Decision:
    """What to do with a pool. `action`: Grow, Shrink, Hold (resize to `actors`), or Park and Release (an instance)."""

    action: str
    actors: int
    reason: str
    time_s: float = 0.0  # predicted time of the rollout
    cost_slot_s: float = 0.0  # predicted slot-seconds, every actor until its own last response


def rollout_size(
    lengths: np.ndarray, speed: Speed, *, current: int, min_actors: int, max_actors: int, prefer: float,
    groups: np.ndarray | None = None,
) -> Decision:
    """How many engines the next rollout gets: the first simple rule.

    lengths (n,) forecast response tokens; groups (n,) the prompt of each (none given: every sequence is its own). For every
    count the sequences are dealt as `deal` does and timed by `speed`; the count with the least
    prefer·time/fastest + (1 - prefer)·cost/cheapest wins, fewer on a tie.
    """
    if not 1 <= min_actors <= max_actors:
        raise ValueError(f"need 1 ≤ min_actors ≤ max_actors, got {min_actors} and {max_actors}")
    groups = np.arange(len(lengths)) if groups is None else groups
    counts = range(min_actors, max(min_actors, min(max_actors, len(np.unique(groups)))) + 1)
    times, costs = [], []
    for count in counts:
        parts = deal(lengths, groups, count)
        each = [speed.rollout_s(lengths[part]) for part in parts]
        times.append(max(each, default=0.0))
        costs.append(sum(each))
    fastest, cheapest = max(min(times), 1e-12), max(min(costs), 1e-12)
    scores = [prefer * t / fastest + (1 - prefer) * c / cheapest for t, c in zip(times, costs, strict=True)]
    best = min(range(len(scores)), key=lambda i: (scores[i], i))
    actors = counts[best]
    action = "Hold" if actors == current else "Grow" if actors > current else "Shrink"
    reason = (
        f"{actors} of {max_actors}: {times[best]:.2f} s for {costs[best]:.2f} slot-s; "
        f"fastest {fastest:.2f} s, cheapest {cheapest:.2f} slot-s, prefer {prefer:g}"
    )
    return Decision(action, actors, reason, times[best], costs[best])


def deal(lengths: np.ndarray, groups: np.ndarray, actors: int) -> list[np.ndarray]:
    """Share sequences out: whole groups (they share a prompt), longest first, each to the least loaded actor.

    lengths (n,) forecast tokens, groups (n,) the prompt of each sequence. Returns `actors` index arrays, some perhaps
    empty. Load is the sum of forecast tokens.
    """
    by_group = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[by_group], prepend=-1)) if len(groups) else np.empty(0, int)
    members = np.split(by_group, starts[1:]) if len(groups) else []
    loads = [(0.0, actor) for actor in range(actors)]
    dealt: list[list[np.ndarray]] = [[] for _ in range(actors)]
    for group in sorted(members, key=lambda m: -float(lengths[m].sum())):
        load, actor = heapq.heappop(loads)
        dealt[actor].append(group)
        heapq.heappush(loads, (load + float(lengths[group].sum()), actor))
    return [np.concatenate(d) if d else np.empty(0, int) for d in dealt]


def after_drain(remaining_s: float, retake_s: float, needed_next: bool) -> Decision:
    """An engine has finished its share while others work: keep its lease for the next phase, or let it go?

    Holding costs `remaining_s` idle slot-seconds; letting go costs `retake_s` of waiting at the hand-over if the next
    phase needs the slot.
    """
    if not needed_next:
        return Decision("Release", 0, "the next phase does not need the slot")
    if remaining_s > retake_s:
        return Decision("Release", 0, f"{remaining_s:.1f} s of tail cost more than {retake_s:.1f} s to take it again")
    return Decision("Hold", 1, f"the tail ends in {remaining_s:.1f} s and the next phase needs the slot")


def slots_to_yield(held: int, least: int, others_wait: bool) -> Decision:
    """On a shared cluster leases are handed from phase to phase and never pass through Ray's queue, so somebody else's
    request would wait for ever: at the end of a step give up half, or everything when only the least is held."""
    if not others_wait or held == 0:
        return Decision("Hold", held, "nobody else waits")
    keep = max(least, math.ceil(held / 2)) if held > least else 0
    return Decision("Release", keep, f"somebody else waits: {held - keep} of {held} slots go back to Ray")
