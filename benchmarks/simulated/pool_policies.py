"""Policies that divide a pool among runs: a market, static partitions, a queue, and interleaving in RollMux's manner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.simulated.pool_work import Stage
from benchmarks.simulated.simulate_pool import Progress
from placement.market import Bid, Clearing, Credits, bid_of, clear, entitled_slots
from placement.planning.objective import Objective
from placement.scaling.resize_policy import preferred_value

SLOW_TAIL = 1.1  # a tail moves to the fewest devices on which it takes at most this times as long


@dataclass
class Market:
    """Clears `placement.market` at every event: bids are what the run expects of the rest of its stage.

    Runs are let in in the order of their arrival, as long as the pool has the devices without which they cannot work. Every change of
    work loads state or wakes engines. Unlike in a real pool, runs do not take turns with devices of which several own a part.
    """

    devices: int
    prefer: float = 0.5
    handover_s: float = 1.0
    credits: Credits = field(default_factory=Credits)
    let_in: list[str] = field(default_factory=list)
    last: tuple[float, dict[str, int], dict[str, int]] = (0.0, {}, {})  # time, devices held and entitled since then
    values_per_s: dict[str, float] = field(default_factory=dict)  # slot-seconds that a second is worth to each run in its present step

    def allocate(self, now_s: float, runs: Sequence[Progress]) -> Mapping[str, int]:
        since, held_before, entitled = self.last
        if now_s > since and entitled:
            self.credits = self.credits.after(now_s - since, held_before, entitled, self.devices)
        there = {progress.run.name: progress for progress in runs}
        self.let_in = [name for name in self.let_in if name in there]
        room = self.devices - sum(there[name].run.least_slots for name in self.let_in)
        for name, progress in there.items():
            if name not in self.let_in:
                if progress.run.least_slots > room:
                    break  # nobody overtakes: a large run would wait for ever
                room -= progress.run.least_slots
                self.let_in.append(name)
        let_in = [there[name] for name in self.let_in]
        self.values_per_s = {progress.run.name: _value_per_s(progress, self.prefer) for progress in let_in}
        bids = self.bids(let_in)
        slots = dict(self.clear(bids, {progress.run.name: progress.slots for progress in let_in}).slots)
        self.last = now_s, slots, entitled_slots(self.devices, bids)
        return slots

    def bids(self, runs: Sequence[Progress]) -> list[Bid]:
        return [self.bid(progress.run.name, _expected(progress), progress.left) for progress in runs]

    def bid(self, name: str, points: Sequence[tuple[int, float]], left: float = 1.0) -> Bid:
        """Return a run's bid for a stage. `points`: devices and seconds of the whole stage. `left`: share of it that is left."""
        held = [(slots, seconds * left, slots * seconds * left) for slots, seconds in points]
        return bid_of(name, held, Objective(prefer=self.prefer), self.values_per_s[name])

    def clear(self, bids: Sequence[Bid], held: Mapping[str, int]) -> Clearing:
        return clear(self.devices, bids, held, self.credits, self.handover_s)

    def setup_s(self, progress: Progress, slots: int) -> float:
        return progress.stage.setup_on(slots)

    def billed(self, runs: Sequence[Progress]) -> Mapping[str, float]:
        return {progress.run.name: float(progress.slots) for progress in runs}


def _value_per_s(progress: Progress, prefer: float) -> float:
    """Return what a second is worth to a run, from the rollout that it expects."""
    rollout = [stage for stage in progress.run.forecast[progress.step] if stage.kind != "learn"]
    return preferred_value(prefer, sum(stage.least_slot_s for stage in rollout), sum(min(stage.seconds) for stage in rollout))


def _expected(progress: Progress) -> list[tuple[int, float]]:
    """Return what a run expects of its stage: devices and seconds. How many hold it is known."""
    stage, least = progress.expected, max(progress.stage.slots[0], progress.expected.slots[0])
    return [(slots, stage.seconds_on(slots)) for slots in sorted({least, *(s for s in stage.slots if s >= least)})]


@dataclass
class Partitions:
    """Static partitions, which runs take in the order of their arrival and keep to their end. One partition is a queue.

    trainers: devices of a partition that only learn, while the others only generate (disaggregated). 0: all of them do both (colocated).
    """

    devices: int
    parts: int
    trainers: int = 0
    places: list[str | None] = field(init=False)

    def __post_init__(self) -> None:
        self.places = [None] * self.parts

    @property
    def size(self) -> int:
        return self.devices // self.parts

    def allocate(self, now_s: float, runs: Sequence[Progress]) -> Mapping[str, int]:
        there = {progress.run.name: progress for progress in runs}
        self.places = [name if name in there else None for name in self.places]
        waiting = [name for name in there if name not in self.places]
        self.places = [name or (waiting.pop(0) if waiting else None) for name in self.places]
        return {name: self._of(there[name].stage) for name in self.places if name}

    def _of(self, stage: Stage) -> int:
        if not self.trainers:
            return self.size
        return self.trainers if stage.kind == "learn" else self.size - self.trainers

    def setup_s(self, progress: Progress, slots: int) -> float:
        """Engines wake and get weights; the learner's state stays where it is."""
        return 0.0 if progress.stage.kind == "learn" else progress.stage.setup_on(slots)

    def billed(self, runs: Sequence[Progress]) -> Mapping[str, float]:
        return {name: float(self.size) for name in self.places if name}


@dataclass
class Interleaved:
    """Groups of runs that take turns on separate engines and trainers, as RollMux (arXiv 2512.11306) describes it.

    A group's rollout devices serve one rollout after another and its trainers one run after another, in the order in which runs come. A
    rollout in its tail moves to few devices, and the next one begins on the others. A run joins the group that slows its members least, if
    each iteration stays below `slowdown` times that of the run alone; otherwise a group of its own, or it waits for one. A group is paid
    for while it has runs, by all alike.
    """

    devices: int
    groups: int
    trainers: int
    slowdown: float = 2.0
    members: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.members = [[] for _ in range(self.groups)]

    @property
    def size(self) -> int:
        return self.devices // self.groups

    @property
    def engines(self) -> int:
        return self.size - self.trainers

    def _phases(self, progress: Progress) -> tuple[float, float]:
        """Return the seconds of a run's rollout and learning, alone in a group."""
        stages = progress.run.forecast[progress.step]
        learn = sum(s.seconds_on(self.trainers) for s in stages if s.kind == "learn")
        return sum(s.seconds_on(self.engines) for s in stages if s.kind != "learn"), learn

    def _slowed(self, group: list[Progress]) -> float:
        """Return by how much the group's cycle is longer than the shortest iteration of a member alone."""
        phases = [self._phases(progress) for progress in group]
        cycle = max(sum(rollout for rollout, _ in phases), sum(learn for _, learn in phases), *map(sum, phases))
        return cycle / min(map(sum, phases))

    def allocate(self, now_s: float, runs: Sequence[Progress]) -> Mapping[str, int]:
        there = {progress.run.name: progress for progress in runs}
        self.members = [[name for name in group if name in there] for group in self.members]
        placed = {name for group in self.members for name in group}
        for name, progress in there.items():
            if name not in placed and not self._place(name, progress, there):
                break
        given: dict[str, int] = {}
        for group in self.members:
            given |= self._take_turns([there[name] for name in group])
        return given

    def _place(self, name: str, progress: Progress, there: Mapping[str, Progress]) -> bool:
        slowed = [(self._slowed([progress, *(there[other] for other in group)]), i) for i, group in enumerate(self.members) if group]
        empty = [i for i, group in enumerate(self.members) if not group]
        best = min(slowed, default=(float("inf"), 0))
        if best[0] > self.slowdown and not empty:
            return False
        self.members[best[1] if best[0] <= self.slowdown else empty[0]].append(name)
        return True

    def _take_turns(self, group: list[Progress]) -> dict[str, int]:
        turns = sorted(group, key=lambda progress: (progress.entered_s if progress.stage.kind != "tail" else -1.0, progress.run.name))
        learning = [progress for progress in turns if progress.stage.kind == "learn"]
        given = {progress.run.name: self.trainers for progress in _first(learning)}
        free = self.engines
        for progress in (progress for progress in turns if progress.stage.kind == "tail"):
            few = self._tail_slots(progress.expected, progress.stage.slots[0])
            if few <= free:
                given[progress.run.name] = few
                free -= few
        rolling = _first([progress for progress in turns if progress.stage.kind == "rollout"])
        if rolling and free >= rolling[0].stage.slots[0]:
            given[rolling[0].run.name] = free
        elif not rolling and len(turns) == 1 and turns[0].stage.kind == "tail":
            given[turns[0].run.name] = self.engines  # nobody waits for the others
        return given

    def _tail_slots(self, stage: Stage, least: int) -> int:
        limit = SLOW_TAIL * stage.seconds_on(self.engines)
        return max(least, next(slots for slots in stage.slots if stage.seconds_on(slots) <= limit))

    def setup_s(self, progress: Progress, slots: int) -> float:
        """Engines wake with new weights. The learner's state is exchanged if the group has several runs."""
        alone = any(group == [progress.run.name] for group in self.members)
        return 0.0 if progress.stage.kind == "learn" and alone else progress.stage.setup_on(slots)

    def billed(self, runs: Sequence[Progress]) -> Mapping[str, float]:
        return {name: self.size / len(group) for group in self.members for name in group}


def _first(runs: list[Progress]) -> list[Progress]:
    """Return the run whose turn it is: the one that works, else the first to come."""
    return sorted(runs, key=lambda progress: not progress.slots)[:1]
