"""A rollout on engines that come and go: own ones, those on the learner's devices for a time, and preemptible ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from benchmarks.simulated.instance_counts import InstanceCounts
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.rollout.decoding import VirtualEngines
from placement.simulate.simulate_step import StepInput

TICK_SHARE = 0.02  # of the longest possible rollout: how often the end of seeding is checked


@dataclass
class Instances:
    """The engines of one pool that a run holds. It follows the availability, up to `limit`, from `now_s` on.

    cold_s: seconds from the lease of an instance to an engine that lacks only weights. held_s: instance-seconds so far, all billed.
    losses: instances preempted so far. since: when each slot's instance came; -inf for those of the beginning.
    """

    trace: InstanceCounts
    now_s: float
    limit: int
    cold_s: float
    rng: np.random.Generator
    held_s: float = 0.0
    losses: int = 0
    since: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.since = dict.fromkeys(range(min(self.limit, self.trace.at(self.now_s))), -math.inf)

    @property
    def next_change_s(self) -> float:
        return self.trace.next_change(self.now_s)

    def use(self, limit: int) -> None:
        """Hold at most so many from now on."""
        self.limit = limit
        self._follow()

    def advance(self, to_s: float) -> list[int]:
        """Go on to a time. Returns the slots whose instance was lost on the way."""
        lost = list[int]()
        while (at := min(to_s, self.next_change_s)) > self.now_s:
            self.held_s += len(self.since) * (at - self.now_s)
            self.now_s = at
            lost += self._follow()
        return lost

    def _follow(self) -> list[int]:
        there = self.trace.at(self.now_s)
        gone = len(self.since) - there
        lost = self.rng.choice(sorted(self.since), gone, replace=False).tolist() if gone > 0 else []
        self.losses += len(lost)
        given_up = sorted(set(self.since) - set(lost), key=lambda slot: -self.since[slot])[
            : max(0, len(self.since) - len(lost) - self.limit)
        ]
        for slot in [*lost, *given_up]:
            del self.since[slot]
        free = (slot for slot in range(self.trace.most) if slot not in self.since)
        while len(self.since) < min(self.limit, there):
            self.since[next(free)] = self.now_s
        return lost


@dataclass(frozen=True)
class Seeding:
    """When the learner's devices generate: from the beginning until `share` of the responses or `seconds` have passed, if others can go on.

    engines: that fit them. wake_s, load_s: seconds until they can generate, and until the learner has its state back.
    """

    engines: int
    share: float
    seconds: float
    wake_s: float
    load_s: float

    @property
    def begins(self) -> bool:
        """Whether a rollout begins with it."""
        return self.engines > 0 and (self.share > 0 or math.isfinite(self.seconds))


@dataclass(frozen=True)
class PoolRollout:
    """Outcome. finish_s (n,): end of each response. learner_s: when the learner has its devices. lost: sequences on lost engines.

    stall_s: the longest time in which nothing decoded, after the first token.
    """

    end_s: float
    finish_s: np.ndarray
    learner_s: float
    moves: int
    lost: int
    stall_s: float


class PoolEngines:
    """One rollout. Actors are numbered: own engines, those on the learner's devices, then slots of preemptible instances."""

    def __init__(
        self, times: PhaseTimes, given: StepInput, own: Instances, seeding: Seeding, spot: Instances, interval_s: float, learn_s: float
    ) -> None:
        """interval_s: seconds of tokens that a loss regenerates. learn_s: of the learner's other work beside the rollout."""
        self.times, self.given, self.own, self.seeding, self.spot = times, given, own, seeding, spot
        self.first_hosted, self.first_spot = own.trace.most, own.trace.most + seeding.engines
        self.interval_s, self.learn_s, self.began_s = interval_s, learn_s, spot.now_s
        self.engines = VirtualEngines(given.lengths, given.prompts, times.speed, 0.0, times.migrate_s, times.capacity)
        self.hosts = seeding.begins
        self.hosts_from_s, self.learner_s, self.lost, self.has_learned = seeding.wake_s, times.broadcast_s, 0, False
        self.stall_s, self.worked_s = 0.0, math.inf
        self.order = np.random.default_rng(given.seed).permutation(len(given.lengths))
        self.open: list[int] = []

    def run(self) -> PoolRollout:
        """Generate all responses."""
        engines, tick = (
            self.engines,
            TICK_SHARE * (4 if self.given.is_trial else 1) * self.times.setting.response_limit * self.times.speed.base_s,
        )
        while not engines.finished.all():
            self._switch()
            if (now := self._now_open()) != self.open:
                engines.place(self._balanced(now), frozenset(now))
                self.open = now
            at = engines.time_s
            changes = [t for t in (*self._ready_s().values(), self.spot.next_change_s - self.began_s) if t > at]
            upto = min([*changes, at + tick] if self.hosts or not now else changes, default=at + tick * 1e6)
            engines.advance(upto)
            if now:
                self.stall_s = max(self.stall_s, at - self.worked_s)
                self.worked_s = engines.time_s
            self.own.advance(self.began_s + engines.time_s)
            self._lose(self.spot.advance(self.began_s + engines.time_s))
        if self.hosts:
            self._give_back()
        return PoolRollout(engines.time_s, engines.finish_s, self.learner_s, engines.moves, self.lost, self.stall_s)

    def _ready_s(self) -> dict[int, float]:
        """Return when each engine can decode, by actor."""
        found = dict.fromkeys(range(self.first_hosted, self.first_spot), self.hosts_from_s) if self.hosts else {}
        for first, pool in ((0, self.own), (self.first_spot, self.spot)):
            for slot, since in pool.since.items():
                found[first + slot] = max(0.0, since + pool.cold_s - self.began_s) + self.times.broadcast_s
        return found

    def _now_open(self) -> list[int]:
        return sorted(actor for actor, ready in self._ready_s().items() if ready <= self.engines.time_s + 1e-9)

    def _switch(self) -> None:
        """End the learner's turn to generate if others can go on, or begin it if no other engine is left."""
        now, seeding = self.engines.time_s, self.seeding
        others = len(self.own.since) + len(self.spot.since)
        if self.hosts and others and now >= self.hosts_from_s:
            is_over = self.engines.finished.mean() >= seeding.share if math.isinf(seeding.seconds) else now >= seeding.seconds
            if is_over and any(not self.first_hosted <= a < self.first_spot for a in self._now_open()):
                self._give_back()
        elif not self.hosts and not others and seeding.engines:
            self.hosts, self.has_learned = True, self.learn_s > 0
            self.hosts_from_s = max(now, self.learner_s + self.learn_s) + seeding.load_s + seeding.wake_s

    def _give_back(self) -> None:
        self.hosts = False
        if not self.has_learned:
            self.learner_s = self.engines.time_s + self.seeding.load_s

    def _lose(self, slots: list[int]) -> None:
        first = self.first_spot
        for slot in slots:
            mine = (self.engines.actor == first + slot) & ~self.engines.finished
            self.lost += int(mine.sum())
            tokens = self.interval_s / (self.times.speed.base_s + self.times.speed.per_seq_s * max(1, int(mine.sum())))
            self.engines.generated[mine] = np.maximum(0.0, self.engines.generated[mine] - tokens)
            self.engines.place(np.where(mine, -1, self.engines.actor), frozenset(self.open) - {first + slot})
            self.open = []  # so that all are placed again

    def _balanced(self, now: list[int]) -> np.ndarray:
        """Spread unfinished sequences evenly with the fewest moves: the shortest queue takes what others have too many of."""
        actor = np.where(np.isin(self.engines.actor, now), self.engines.actor, -1)
        if not now:
            return actor
        live = self.order[~self.engines.finished[self.order]]
        held = {a: live[actor[live] == a] for a in now}
        fullest = sorted(now, key=lambda a: (-len(held[a]), a))
        least, more = divmod(len(live), len(now))
        target = {a: least + (i < more) for i, a in enumerate(fullest)}
        over = [live[actor[live] < 0], *(held[a][target[a] :] for a in now)]
        pool = np.concatenate(over)
        for a in now:
            take = max(0, target[a] - len(held[a]))
            actor[pool[:take]] = a
            pool = pool[take:]
        return actor
