"""Runs on own and preemptible devices: policies from the same moments of an availability on, beside `fixed` on own devices alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulated.pool_steps import PlannedPools, PoolMarket, PoolPlan, PoolStep, RLBoost, TriedPlans
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.setting import Setting
from placement.simulate.simulate_run import Forecasts, simulate, step_input, workload_of
from placement.simulate.simulate_step import StepInput

PREFERS = (0.5, 0.75, 1.0)  # of our policy
EQUAL = 0.005  # relative difference below which two times or costs count as equal


@dataclass(frozen=True)
class Course:
    """How long a run is. moments: of the availability, evenly spread, from each of which it goes on for `steps` steps after `warm_up`."""

    moments: int = 8
    steps: int = 3
    warm_up: int = 1


@dataclass(frozen=True)
class PoolFigures:
    """Means over the steps of a policy. money: own device-seconds a step. lost: sequences of a step on lost instances. stall_s: the longest
    time in which nothing decoded although responses were left."""

    step_s: float
    money: float
    tokens_per_s: float
    lost: float = 0.0
    stall_s: float = 0.0

    def over(self, base: PoolFigures) -> dict[str, float]:
        return {"speedup": self.tokens_per_s / base.tokens_per_s, "saving": 1 - self.money / base.money}


def inputs_of(setting: Setting, steps: int, seed: int) -> list[StepInput]:
    """Return the inputs of so many steps, each forecast from those before it."""
    setting = setting.but(epochs=steps + 1, steps_per_epoch=1)
    workload, forecasts = workload_of(setting, seed), Forecasts(setting, seed)
    forecasts.begin(workload)
    found = []
    for step in range(steps + 1):
        found.append(step_input(workload, step, forecasts, seed))
        forecasts.observe(workload, step)
    return found[1:]


def fixed_figures(setting: Setting, course: Course, seed: int) -> PoolFigures:
    """Return what `fixed` takes at its best width with the setting's lag. It holds all devices, which are own ones."""
    given = inputs_of(setting, course.warm_up + course.steps, seed)[course.warm_up :]
    run = simulate(setting.but(epochs=course.warm_up + course.steps + 1, steps_per_epoch=1), ["fixed"], seed).policies["fixed"]
    steps = run.steps[1 + course.warm_up :]
    seconds, money = (float(np.mean([getattr(step, name) for step in steps])) for name in ("time_s", "full"))
    return PoolFigures(seconds, money, float(np.mean([one.tokens.sum() for one in given])) / seconds)


@dataclass
class MixedPoolRun:
    """Runs of a setting on what a market has."""

    setting: Setting
    market: PoolMarket
    course: Course = Course()
    seed: int = 0

    def __post_init__(self) -> None:
        self.times = PhaseTimes.from_setting(self.setting)
        self.inputs = inputs_of(self.setting, self.course.warm_up + self.course.steps, self.seed)
        self.plans = TriedPlans(self.times, self.market)
        reserved = self.market.most - self.market.spot
        self.widths = [
            one.width for one in self.times.widths if one.min_learner <= reserved and one.width <= min(reserved, self.market.spot or 8)
        ]
        if not self.widths:
            raise ValueError(
                f"the learner needs {self.times.min_learner} own devices, and {reserved} are left beside {self.market.spot} others"
            )

    def usual(self, prefer: float) -> PoolPlan:
        """Return the plan with all instances there. Its width of engines is every policy's."""
        return self.plans.best(self.inputs[0], {width: self.market.spot // width for width in self.widths}, prefer)

    def rlboost(self) -> PoolFigures:
        policy = RLBoost(self.usual(1.0).width)
        return self._figures(policy, policy.width)

    def ours(self, prefer: float) -> PoolFigures:
        usual = self.usual(prefer)
        return self._figures(PlannedPools(self.plans, prefer, usual), usual.width)

    def _figures(self, policy: RLBoost | PlannedPools, width: int) -> PoolFigures:
        rates, done = list[tuple[float, float]](), list[PoolStep]()
        span_s = self.market.trace.span_s if np.isfinite(self.market.trace.span_s) else 0.0
        moments = self.course.moments if span_s else 1
        for k in range(moments):
            held = self.market.holdings(width, span_s * (k + 0.5) / moments, self.seed * 1000 + k)
            steps = [policy.step(self.times, given, self.market, held) for given in self.inputs][self.course.warm_up :]
            seconds, money = sum(step.time_s for step in steps), sum(step.money for step in steps)
            rates.append((len(steps) / seconds, money / seconds))  # moments are even in time, so rates are averaged
            done += steps
        steps_per_s, money_per_s = (float(np.mean(rate)) for rate in zip(*rates, strict=True))
        tokens = float(np.mean([given.tokens.sum() for given in self.inputs[self.course.warm_up :]]))
        lost, stall_s = float(np.mean([step.lost for step in done])), max(step.stall_s for step in done)
        return PoolFigures(1 / steps_per_s, money_per_s / steps_per_s, tokens * steps_per_s, lost, stall_s)


def at_equal(found: Sequence[PoolFigures], base: PoolFigures) -> dict[str, float]:
    """Return the highest speed at no more money a token than `base`, and the largest saving at no less speed. Nan if there is none."""
    pairs = [figures.over(base) for figures in found]
    return {
        "speedup": max((pair["speedup"] for pair in pairs if pair["saving"] >= -EQUAL), default=float("nan")),
        "saving": max((pair["saving"] for pair in pairs if pair["speedup"] >= 1 - EQUAL), default=float("nan")),
    }
