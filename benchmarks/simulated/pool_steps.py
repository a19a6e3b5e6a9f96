"""Steps on own and preemptible devices: RLBoost's policy and ours, at a lag of zero or one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.simulated.instance_counts import InstanceCounts
from benchmarks.simulated.pool_rollout import Instances, PoolEngines, Seeding
from placement.simulate.learner_queue import LearnerDevices, run_learner
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.simulate_step import StepInput, costs_of, work_of

STEP, LEAST_SEED_S, FIRST_SEED_S = 1 / 3, 5.0, 60.0  # RLBoost's step of the seeding time, its least, and where it begins here
MEMORY, MEMORY_OF_CHANGE = 0.8, 0.2  # weights of RLBoost's newest seeding time for a number of instances
SHARES = (0.0, 0.4, 0.6, 0.75, 0.9, 1.0)  # shares of ended responses until which the learner's devices generate
USED = (0.0, 0.5, 0.75, 1.0)  # shares of the engines of each kind that are held


@dataclass(frozen=True)
class PoolMarket:
    """What a run may hold. Its own devices have price 1.

    own: devices of its own that it may hold. most: devices of both kinds together, so own ones take the place of missing preemptible ones.
    trace: of preemptible instances, each with the devices of one engine. spot: most devices of them. price: of a device-second.
    interval_s: seconds between two reports of tokens. notice_s: before a preemption. cold_s: from the lease of an instance until its
    engine lacks only weights.
    """

    own: int
    most: int
    trace: InstanceCounts
    spot: int
    price: float
    interval_s: float = 1.0
    notice_s: float = 0.0
    cold_s: float = 59.0

    @property
    def regenerated_s(self) -> float:
        """Seconds of tokens that a loss regenerates: none if the notice lets the stream be read to its end."""
        return 0.0 if self.notice_s >= self.interval_s else self.interval_s

    def holdings(self, width: int, from_s: float, seed: int) -> Holdings:
        """Return what a run may hold that begins at a time of the trace. It has held all of it."""
        rng, trace = np.random.default_rng(seed), self.trace.scaled(self.spot // width)
        own = Instances(InstanceCounts.constant(self.own // width), from_s, self.own // width, self.cold_s, rng)
        return Holdings(own, Instances(trace, from_s, trace.most, self.cold_s, rng))


@dataclass(frozen=True)
class Holdings:
    """The engines of a run: those on devices of its own without the learner's, and those on preemptible instances."""

    own: Instances
    spot: Instances

    @property
    def there(self) -> int:
        """Preemptible instances that could be held now."""
        return self.spot.trace.at(self.spot.now_s)

    def advance(self, to_s: float) -> None:
        self.own.advance(to_s)
        self.spot.advance(to_s)


@dataclass(frozen=True)
class PoolPlan:
    """learner: devices of the learner. own, spot: most engines of each kind. width: of engines. share, seed_s: see `Seeding`."""

    learner: int
    own: int
    spot: int
    width: int
    share: float
    seed_s: float = math.inf


@dataclass(frozen=True)
class PoolStep:
    """Outcome of a step. money: of all devices held; an own device-second is 1. learner_idle_s: while the learner waited for responses."""

    time_s: float
    rollout_s: float
    money: float
    learner_idle_s: float
    lost: int
    moves: int
    stall_s: float


def run_step(times: PhaseTimes, given: StepInput, plan: PoolPlan, market: PoolMarket, held: Holdings) -> PoolStep:
    """Simulate a step, and advance the holdings to its end. What is held is billed throughout.

    With a lag of zero the learner works on complete groups beside the rest of the rollout. With a lag of one it learns the step before.
    """
    times, m, own, spot = times.at(plan.width), plan.learner, held.own, held.spot
    own.use(plan.own)
    spot.use(plan.spot)
    began_s, before_s = spot.now_s, (own.held_s, spot.held_s)
    seeding = Seeding(m // plan.width, plan.share, plan.seed_s, times.warm_s + times.reshard_s, times.state_s(m))
    has_lag, tokens = times.setting.max_lag_steps > 0, float(given.tokens.sum())
    learned = given.learned_tokens if has_lag else tokens
    work_s = times.prepare_s(learned, m) + times.learn_s(learned, m)
    engines = max(1, len(own.since) + len(spot.since) + seeding.engines * seeding.begins)
    _, first = np.unique(given.group, return_index=True)
    prefill_s = times.prefill_s(float(given.prompts[first].sum()), engines)
    held.advance(began_s + prefill_s)
    rollout = PoolEngines(times, given, own, seeding, spot, market.regenerated_s, work_s * has_lag).run()
    rollout_s, learner_s = rollout.end_s + prefill_s, rollout.learner_s + prefill_s * (seeding.begins or not has_lag)
    if has_lag or learner_s >= rollout_s:
        end_s = max(rollout_s, learner_s + work_s)
    else:
        is_whole = not times.trainer.sharding(m).per_forward  # gradients before the last response need weights that are not sharded
        work = work_of(times, given, rollout.finish_s + prefill_s, gradients=is_whole)
        done = run_learner(work, LearnerDevices(m, m, learner_s, rollout_s), costs_of(times, work))
        end_s, work_s = done.end_s, done.busy / m
    held.advance(began_s + end_s)
    money = m * end_s + plan.width * (own.held_s - before_s[0] + market.price * (spot.held_s - before_s[1]))
    return PoolStep(end_s, rollout_s, money, max(0.0, end_s - learner_s - work_s), rollout.lost, rollout.moves, rollout.stall_s)


@dataclass
class RLBoost:
    """RLBoost's own policy (arXiv 2510.19225; github.com/Terra-Flux/PolyRL, balance.rs).

    All own devices are the trainer's, as many as are there besides all instances. They seed the rollout for a time, then train while
    the instances finish. After each step the time moves by a third of the difference between the waits of trainer and instances. The
    best time for each number of instances is remembered. All instances are held, and the shortest queue takes what moves. Its
    released version cannot go on without an instance; here the trainer's devices then generate everything.
    """

    width: int
    seed_s: float = FIRST_SEED_S
    best: dict[int, float] = field(default_factory=dict)
    peak_s: float = 0.0
    speed: float = 0.0
    count: int = -1

    def step(self, times: PhaseTimes, given: StepInput, market: PoolMarket, held: Holdings) -> PoolStep:
        reserved = (market.most - market.spot) // self.width * self.width
        plan = PoolPlan(reserved, 0, held.spot.trace.most, self.width, 0.0, self.seed_s)
        done = run_step(times, given, plan, market, held)
        self._adjust(done, len(held.spot.since), float(given.tokens.sum()) / done.time_s)
        return done

    def _adjust(self, done: PoolStep, count: int, speed: float) -> None:
        if count != self.count:
            self._remember(MEMORY_OF_CHANGE)
            self.speed, self.count = 0.0, count
            if count in self.best:
                self.seed_s = self.peak_s = self.best[count]
                return
        else:
            if speed <= self.speed:
                self._remember(MEMORY)
            else:
                self.peak_s = self.seed_s
            self.speed = speed
        more_s = STEP * (done.learner_idle_s - (done.time_s - done.rollout_s))
        self.seed_s = max(LEAST_SEED_S, self.seed_s + more_s)

    def _remember(self, weight: float) -> None:
        before = self.best.get(self.count, self.peak_s)
        self.best[self.count] = (1 - weight) * before + weight * self.peak_s


@dataclass
class TriedPlans:
    """Plans by the engines' width and the instances that are there, tried on forecasts. Several `prefer`s choose from the same trials."""

    times: PhaseTimes
    market: PoolMarket
    tried: dict[tuple[int, int, int], list[tuple[PoolPlan, float, float]]] = field(default_factory=dict)
    base: tuple[float, float] | None = None

    def best(self, given: StepInput, there: dict[int, int], prefer: float, learner: int = 0) -> PoolPlan:
        """Return the plan with the least prefer · time + (1 - prefer) · money, both over those of own devices that do everything.

        there: instances by the width of engines. learner: its devices, 0 if the plan may choose them.
        """
        rows = []
        for width, count in there.items():
            if (key := (width, count, learner)) not in self.tried:
                self.tried[key] = [(plan, *self._try(given, plan, count)) for plan in self._candidates(width, count, learner)]
            rows += self.tried[key]
        time_s, money = self.base = self.base or rows[0][1:]
        return min(rows, key=lambda row: prefer * row[1] / time_s + (1 - prefer) * row[2] / money)[0]

    def _candidates(self, width: int, there: int, learner: int) -> Iterator[PoolPlan]:
        """Yield plans, first that of own devices for everything."""
        most = min(self.market.own, self.market.most - there * width)
        for m in [learner] if learner else reversed(self.times.at(width).sizes(most // width * width)):
            for own in sorted({round(share * ((most - m) // width)) for share in USED}):
                for spot in sorted({round(share * there) for share in USED}):
                    shares = SHARES if own or spot else SHARES[-1:]
                    yield from (PoolPlan(m, own, spot, width, share) for share in shares)

    def _try(self, given: StepInput, plan: PoolPlan, there: int) -> tuple[float, float]:
        """Return time and money on the scenario whose longest response is the median."""
        median = np.argsort(given.scenarios.max(0))[given.scenarios.shape[1] // 2]
        view = replace(given, lengths=given.scenarios[:, median], is_trial=True, cache={})
        market = replace(self.market, trace=InstanceCounts.constant(there), spot=there * plan.width, cold_s=0.0)
        done = run_step(self.times, view, plan, market, market.holdings(plan.width, 0.0, 0))
        return done.time_s, done.money


@dataclass
class PlannedPools:
    """Our policy: the plan that forecasts find best for the instances that are there, with prices. The learner keeps its devices."""

    plans: TriedPlans
    prefer: float
    usual: PoolPlan

    def step(self, times: PhaseTimes, given: StepInput, market: PoolMarket, held: Holdings) -> PoolStep:
        plan = self.plans.best(given, {self.usual.width: held.there}, self.prefer, self.usual.learner)
        return run_step(times, given, plan, market, held)
