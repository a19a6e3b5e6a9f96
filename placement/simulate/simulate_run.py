"""Simulate a run: step after step under several policies on the same workload, forecast from earlier steps only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.catalog.catalog import match_name
from placement.forecast.forecaster import LengthForecaster
from placement.planning.bounds import Bounds
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.plan_search import Planner
from placement.simulate.setting import Setting
from placement.simulate.simulate_step import StepInput, StepRun
from placement.simulate.step_bounds import step_bounds
from placement.simulate.step_policies import POLICIES, Policy, fixed, policies_of
from placement.simulate.synthetic_workload import SyntheticWorkload, replay, synthesise

SCENARIOS = 32


@dataclass(frozen=True)
class PolicyRun:
    """All steps of one policy."""

    policy: str
    steps: tuple[StepRun, ...]
    cpu_s: float  # CPU seconds that simulating it took

    @property
    def step_s(self) -> float:
        return float(np.mean([s.time_s for s in self.steps]))

    @property
    def full(self) -> float:
        return float(np.mean([s.full for s in self.steps]))

    @property
    def busy(self) -> float:
        return float(np.mean([s.busy for s in self.steps]))


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated run of a setting. bounds: lower bounds per step, which no policy can beat unless responses outlive a step."""

    setting: Setting
    seed: int
    policies: dict[str, PolicyRun]
    bounds: tuple[Bounds, ...]
    epochs: tuple[int, ...]  # of each step

    @property
    def bound_s(self) -> float:
        return float(np.mean([b.time_s for b in self.bounds]))

    @property
    def bound_cost(self) -> float:
        return float(np.mean([b.cost for b in self.bounds]))


@dataclass
class Forecasts:
    """Forecasts a step's lengths from earlier steps."""

    setting: Setting
    seed: int
    forecaster: LengthForecaster = field(init=False)

    def __post_init__(self) -> None:
        self.forecaster = LengthForecaster(self.setting.response_limit / 4, max_tokens=self.setting.response_limit)

    def begin(self, workload: SyntheticWorkload) -> None:
        """Observe what happened before the first step."""
        if workload.earlier is not None:
            prompts, tokens, lengths = workload.earlier
            self.forecaster.observe(prompts.tolist(), tokens.tolist(), list(lengths))

    def scenarios(self, workload: SyntheticWorkload, step: int) -> np.ndarray:
        drawn = self.forecaster.scenarios(
            workload.prompts[step], workload.prompt_tokens[step], workload.lengths.shape[2], SCENARIOS, seed=self.seed * 1000 + step
        )
        return np.clip(drawn, 1, self.setting.response_limit)

    def observe(self, workload: SyntheticWorkload, step: int) -> None:
        self.forecaster.observe(workload.prompts[step], workload.prompt_tokens[step], list(workload.lengths[step]))


def workload_of(setting: Setting, seed: int) -> SyntheticWorkload:
    """Return the setting's workload: its recording, or synthetic lengths. Raises ValueError as `replay` and `synthesise` do."""
    s = setting
    if s.trace is not None:
        recorded = replay(s.trace, prompts=s.prompts, epochs=s.epochs, response_limit=s.response_limit, column=s.trace_column, seed=seed)
        if s.algorithm == "grpo" and recorded.lengths.shape[2] < 2:
            raise ValueError(
                f"{s.trace}: one response to each prompt, and GRPO compares several; name the prompt of each row in a column "
                "`prompt`, or set `algorithm: ppo`"
            )
        return recorded
    return synthesise(
        s.lengths,
        prompts=s.prompts,
        samples=s.samples,
        steps_per_epoch=s.steps_per_epoch,
        epochs=s.epochs,
        response_limit=s.response_limit,
        prompt_limit=s.prompt_limit,
        seed=seed,
    )


def simulate(setting: Setting, policies: Sequence[str | tuple[str, Policy]] | None = None, seed: int = 0) -> SimulatedRun:
    """Run every policy on the same workload with the same forecasts. Deterministic in `seed`.

    policies: names of `policies_of(setting)` (default: all), or (name, function) of your own. Raises ValueError for an
    unknown policy, or whatever is wrong with the setting.
    """
    known = policies_of(setting)
    chosen = [(p, _named_policy(p, known)) if isinstance(p, str) else p for p in (known if policies is None else policies)]
    workload = workload_of(setting, seed)
    setting = setting.but(samples=workload.lengths.shape[2])
    times = PhaseTimes.from_setting(setting)
    forecasts = Forecasts(setting, seed)
    forecasts.begin(workload)
    done: dict[str, list[StepRun]] = {name: [] for name, _ in chosen}
    spent = dict.fromkeys(done, 0.0)
    bounds: list[Bounds] = []
    planner: Planner | None = None
    for step in range(len(workload.epoch)):
        given = step_input(workload, step, forecasts, seed)
        if planner is None:
            planner = Planner(given, setting.prefer, lambda view: fixed(times, view, None))  # type: ignore[arg-type]
        new_epoch = step > 0 and workload.epoch[step] != workload.epoch[step - 1]
        planner.renew(given, forget=new_epoch or step == 1)
        for name, policy in chosen:
            began = time.process_time()
            planner.expected = None
            done[name].append(policy(times, given, planner))
            spent[name] += time.process_time() - began
        bounds.append(step_bounds(times, given))
        forecasts.observe(workload, step)
    runs = {name: PolicyRun(name, tuple(steps), spent[name]) for name, steps in done.items()}
    return SimulatedRun(setting, seed, runs, tuple(bounds), tuple(int(e) for e in workload.epoch))


def _named_policy(name: str, known: dict[str, Policy]) -> Policy:
    if name in POLICIES and name not in known:
        raise ValueError(f"policy `{name}` knows no lag; simulate {', '.join(f'`{k}`' for k in known)}")
    return known[match_name("policy", name, list(known))]


def step_input(workload: SyntheticWorkload, step: int, forecasts: Forecasts, seed: int) -> StepInput:
    """Return a step's input. Beside the first rollout the last step is learned, so that a run learns each batch once."""
    samples = workload.lengths.shape[2]
    return StepInput(
        workload.lengths[step].ravel(),
        np.repeat(workload.prompt_tokens[step], samples),
        np.repeat(np.arange(workload.prompts.shape[1]), samples),
        forecasts.scenarios(workload, step),
        seed * 1000 + step,
        learned_tokens=float(workload.lengths[step - 1].sum() + samples * workload.prompt_tokens[step - 1].sum()),
    )
