"""Where the time of a step goes, from a run's ledger: which instances worked when, and when none did.

The time of a step runs from its `begin_step` to the next one's. In it, *covered* time is that in which at least one
instance works, moves weights or starts, and says so with a span; what is not covered is **overhead**: the driver's own
time, waits for leases, hand-overs, calls and their answers. Overhead is on the critical path by construction, because
nothing else ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhfless_ray.functions.ledger import Row

Interval = tuple[float, float]

WORK = {"rollout": "generate", "score": "score", "learn": "learn"}  # kind of instance → its part of the step
PARTS = ("generate", "score", "learn", "publish", "load", "start")


@dataclass(frozen=True)
class StepAnatomy:
    """One step, in seconds of wall time; slot-seconds where the name says so."""

    step: int
    wall_s: float
    parts: dict[str, float]  # of PARTS: time in which some instance does this (two at once count once)
    overhead_s: float  # no instance does anything
    overhead_by_holder: dict[str, float]  # who had the leases then: rollout, score, learn or nobody
    idle_slot_s: float
    held_slot_s: float

    @property
    def overhead_share(self) -> float:
        return self.overhead_s / self.wall_s if self.wall_s else 0.0


def anatomy(rows: Sequence[Row]) -> dict[int, StepAnatomy]:
    """Every step of the ledger; step 0 is the time before the first one."""
    by_step: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    return {step: _of_step(step, by_step[step]) for step in sorted(by_step)}


def _of_step(step: int, rows: list[Row]) -> StepAnatomy:
    # Something is always open, leased or parked, and cut when a step begins: the rows cover the step from end to end.
    window = (min(row.from_s for row in rows), max(row.to_s for row in rows))
    spans: defaultdict[str, list[Interval]] = defaultdict(list)
    for row in rows:
        part = part_of(row)
        if part:
            spans[part].append((row.from_s, row.to_s))
    covered = union(interval for intervals in spans.values() for interval in intervals)
    gaps = complement(covered, window)
    held = defaultdict(list)
    for row in rows:
        if row.slots:
            held[row.kind].append((row.from_s, row.to_s))
    return StepAnatomy(
        step,
        window[1] - window[0],
        {part: length(union(spans[part])) for part in PARTS},
        length(gaps),
        _by_holder(gaps, held),
        sum(r.slots * (r.to_s - r.from_s) for r in rows if r.activity == "idle"),
        sum(r.slots * (r.to_s - r.from_s) for r in rows),
    )


def gaps(rows: Sequence[Row], steps: Iterable[int]) -> dict[str, list[float]]:
    """Overhead by where it lies: {"generate → score": seconds of each such gap}, over the given steps."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        own = [row for row in rows if row.step == step]
        window = (min(row.from_s for row in own), max(row.to_s for row in own))
        parts = [(row.from_s, row.to_s, part) for row in own if (part := part_of(row))]
        for begin, end in complement(union((a, b) for a, b, _ in parts), window):
            before = max((p for p in parts if p[1] <= begin), key=lambda p: p[1], default=(0.0, 0.0, "step begins"))
            after = min((p for p in parts if p[0] >= end), key=lambda p: p[0], default=(0.0, 0.0, "next step"))
            found[f"{before[2]} → {after[2]}"].append(end - begin)
    return dict(found)


def part_of(row: Row) -> str | None:
    if row.activity == "work":
        return WORK.get(row.kind, "learn")
    if row.activity == "transfer":
        return "publish" if row.kind == "learn" else "load"
    return "start" if row.activity == "start" else None


def _by_holder(gaps: list[Interval], held: dict[str, list[Interval]]) -> dict[str, float]:
    """Overhead by who held leases meanwhile. Leases that several kinds hold at a time count for the first kind named."""
    found, left = {}, gaps
    for kind in ("rollout", "score", "learn"):
        mine = union(held.get(kind, []))
        found[kind] = length(left) - length(without(left, mine))
        left = without(left, mine)
    return {**found, "nobody": length(left)}


def warm_starts(rows: Sequence[Row], first_step: int) -> dict[str, list[float]]:
    """{kind: seconds from a lease's hand-over to the first span of the instance that got it}, once per step and instance."""
    by_key: defaultdict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.slots and row.instance and row.step >= first_step:
            by_key[row.kind, row.instance, row.step].append(row)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for (kind, _, _), own in by_key.items():
        active = [row.from_s for row in own if row.activity != "idle"]
        if active:
            # A learner may hold its leases into the next step: the idle time just before the span is the hand-over's.
            idle = [row for row in own if row.activity == "idle" and row.to_s <= min(active)]
            last = max(idle, key=lambda row: row.to_s, default=None)
            found[kind].append(last.to_s - last.from_s if last else 0.0)
    return dict(found)


# ---- intervals: sorted, disjoint lists of (from, to) -------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def complement(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    return without([window], intervals)


def without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What of `intervals` lies outside `taken`; both sorted and disjoint."""
    left: list[Interval] = []
    for begin, end in intervals:
        at = begin
        for start, stop in taken:
            if stop <= at or start >= end:
                continue
            if start > at:
                left.append((at, start))
            at = max(at, stop)
        if at < end:
            left.append((at, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return float(sum(end - begin for begin, end in intervals))
