"""Many runs on one pool in virtual time: an event queue of arrivals, ends of stages, and devices that begin to work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.simulated.pool_work import ArrivingRun, Stage

CLOSE = 1e-9  # seconds, or share of a stage, that count as none


@dataclass
class Progress:
    """A run at work. left: share of the current stage that is left. slots: devices it holds, of which `working` work, all of them from
    `ready_s` on."""

    run: ArrivingRun
    step: int = 0
    part: int = 0
    left: float = 1.0
    slots: int = 0
    working: int = 0
    ready_s: float = 0.0
    entered_s: float = 0.0  # when it came to the current stage
    begun_s: float | None = None  # when it got its first device

    @property
    def stage(self) -> Stage:
        return self.run.steps[self.step][self.part]

    @property
    def expected(self) -> Stage:
        """What the run knows of its current stage: the same part of the step before."""
        parts = self.run.forecast[self.step]
        return next((s for s in parts[min(self.part, len(parts) - 1) :] if s.kind == self.stage.kind), parts[-1])

    @property
    def ends_in_s(self) -> float:
        return self.left * self.stage.seconds_on(self.working) if self.working else math.inf


class PoolPolicy(Protocol):
    """Divides a pool among runs."""

    def allocate(self, now_s: float, runs: Sequence[Progress]) -> Mapping[str, int]:
        """Return the devices of each run, those that have arrived in order. Runs that are left out have none."""

    def setup_s(self, progress: Progress, slots: int) -> float:
        """Return the seconds until devices that a run takes for its stage work."""

    def billed(self, runs: Sequence[Progress]) -> Mapping[str, float]:
        """Return the devices that each run pays for now."""


@dataclass(frozen=True)
class PoolHold:
    """Devices that a run held from one time to another."""

    run: str
    slots: int
    from_s: float
    to_s: float


@dataclass
class PoolOutcome:
    """Outcome of a policy. end_s, begun_s, cost: of each run; cost in device-seconds that it paid for."""

    devices: int
    runs: tuple[ArrivingRun, ...]
    end_s: dict[str, float] = field(default_factory=dict)
    begun_s: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    holds: list[PoolHold] = field(default_factory=list)

    @property
    def work(self) -> float:
        return sum(run.work for run in self.runs)

    @property
    def makespan_s(self) -> float:
        return max(self.end_s.values()) - min(run.arrival_s for run in self.runs)

    @property
    def work_per_slot_s(self) -> float:
        """Share of the pool's device-seconds that is work, from the first arrival to the last end. 1 cannot be exceeded."""
        return self.work / (self.devices * self.makespan_s)

    @property
    def work_per_paid_s(self) -> float:
        """The same of the device-seconds that runs paid for."""
        return self.work / sum(self.cost.values())

    @property
    def times_s(self) -> list[float]:
        """Seconds from the arrival of each run to its end."""
        return [self.end_s[run.name] - run.arrival_s for run in self.runs]


def simulate_pool(runs: Sequence[ArrivingRun], devices: int, policy: PoolPolicy) -> PoolOutcome:
    """Run all runs under a policy. Raises RuntimeError if it leaves all runs without devices for ever or gives more than there are, and
    ValueError for a stage with fewer devices than it needs."""
    arriving = sorted(runs, key=lambda run: (run.arrival_s, run.name))
    outcome = PoolOutcome(devices, tuple(runs), cost={run.name: 0.0 for run in runs})
    active: list[Progress] = []
    now = arriving[0].arrival_s
    while arriving or active:
        while arriving and arriving[0].arrival_s <= now + CLOSE:
            active.append(Progress(arriving.pop(0), entered_s=now))
        given = policy.allocate(now, active)
        if sum(given.values()) > devices:
            raise RuntimeError(f"{sum(given.values())} devices were given at {now:.3f} s, but the pool has {devices}")
        for progress in active:
            _hand(progress, given.get(progress.run.name, 0), now, policy)
        events = [run.arrival_s for run in arriving[:1]] + [progress.ready_s for progress in active if progress.ready_s > now + CLOSE]
        until = min([*events, *(now + progress.ends_in_s for progress in active)])
        if math.isinf(until):
            raise RuntimeError(f"at {now:.3f} s {len(active)} runs wait for devices, and none works")
        for name, billed in policy.billed(active).items():
            outcome.cost[name] += billed * (until - now)
        for progress in active:
            if progress.slots:
                outcome.holds.append(PoolHold(progress.run.name, progress.slots, now, until))
            if progress.working:
                progress.left -= (until - now) / progress.stage.seconds_on(progress.working)
        now = until
        for progress in list(active):
            if progress.left <= CLOSE and not _advance(progress, now):
                active.remove(progress)
                outcome.end_s[progress.run.name] = now
                outcome.begun_s[progress.run.name] = progress.begun_s if progress.begun_s is not None else now
    return outcome


def _hand(progress: Progress, slots: int, now: float, policy: PoolPolicy) -> None:
    """Give a run its devices. Those that are new to it work after their set-up, while the others go on."""
    if 0 < slots < progress.stage.slots[0]:
        raise ValueError(f"{progress.run.name} needs {progress.stage.slots[0]} devices for its {progress.stage.kind} stage, got {slots}")
    if slots and progress.begun_s is None:
        progress.begun_s = now
    if slots > progress.slots or (slots and not progress.slots):
        progress.ready_s = now + policy.setup_s(progress, slots)
    elif slots < progress.slots:
        progress.working = min(progress.working, slots)
    progress.slots = slots
    if progress.ready_s <= now + CLOSE:
        progress.working = slots
    if progress.working < progress.stage.slots[0]:
        progress.working = 0  # too few go on; all begin once the others are ready


def _advance(progress: Progress, now: float) -> bool:
    """Go on to the next stage. Returns whether there is one. Devices change their work between a rollout and learning."""
    before = progress.stage.kind
    progress.left, progress.entered_s, progress.part = 1.0, now, progress.part + 1
    if progress.part == len(progress.run.steps[progress.step]):
        progress.step, progress.part = progress.step + 1, 0
        if progress.step == len(progress.run.steps):
            return False
    if (before == "learn") != (progress.stage.kind == "learn"):
        progress.slots = progress.working = 0  # the next stage takes them again, with its set-up
    return True
