"""Step policies whose responses may outlive a step: those of the baselines' authors, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from placement.simulate.ahead import candidates_ahead, neighbours_ahead, starts_ahead, step_ahead
from placement.simulate.elastic_policy import ROUGH_POLICY, elastic
from placement.simulate.one_step_off import splits
from placement.simulate.partial_rollout import InFlight, PartialGeneration
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.plan_candidates import PREFERS, SHARES, candidates, fits, neighbours
from placement.simulate.plan_search import Planner
from placement.simulate.simulate_step import StepInput, StepPlanSettings, StepRun, all_phases, describe_split, separate_holds

MORE = (0.125, 0.25, 0.375, 0.5)  # shares of a step's groups that are begun beyond those it trains
AHEAD = "ours (ahead)"  # name of partial rollouts that begin beside the update
TRIED = 3  # steps of the pipeline that such a share is tried on, once the pipeline is full

Policy = Callable[[PhaseTimes, StepInput, Planner], StepRun]
Steps = Callable[[PhaseTimes, StepInput, StepPlanSettings, PartialGeneration, float, str], StepRun]


@dataclass(frozen=True)
class SearchSpace:
    """The plans of a search in each step. begin: where it begins. near: the plans next to one."""

    begin: Callable[[PhaseTimes], list[StepPlanSettings]]
    near: Callable[[PhaseTimes, StepPlanSettings], list[StepPlanSettings]]


class Partial:
    """A step policy with state: the responses in flight.

    Before the first step the pipeline is filled with scenarios of that step. Share of groups begun beyond the quota,
    width, and for separate pools their split are those that take the least on scenarios, like every static choice.
    """

    def __init__(
        self,
        name: str,
        steps: Steps,
        plans: Callable[[PhaseTimes], list[StepPlanSettings]],
        extra_lag: int = 0,
        space: SearchSpace | None = None,
        versions_in_step: int = 1,
    ) -> None:
        """plans: candidates for the plan and for the share of groups begun beyond the quota. The best pair is used in every step.

        extra_lag: 1 if a rollout works beside the update of the batch before it, which makes its tokens one version older.
        space: plans that a search in each step may take; it replaces the fixed plan. None: no search. versions_in_step: of
        the weights that a step's rollout may use.
        """
        self.name, self.steps, self.plans, self.extra_lag, self.space, self.versions_in_step = (
            name,
            steps,
            plans,
            extra_lag,
            space,
            versions_in_step,
        )
        self.chosen: tuple[StepPlanSettings, float] | None = None
        self.state: InFlight | None = None
        self.learned = 0.0

    def __call__(self, times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
        if self.chosen is None:
            self.chosen = self._choose(times, given, planner)
            self.state, self.learned, _ = self._filled(times, given, *self.chosen)
        assert self.state is not None
        state = self.state.begin(given)
        view = state.step_input(given, times.setting.response_limit)
        plan, generation = self.chosen[0], PartialGeneration(state)
        if self.space is not None:
            plan = self._search(times, view, planner, PartialGeneration(state), self.space)
        done = self.steps(times, view, plan, generation, self.learned, "ours")
        return self._commit(done, generation, planner)

    def _commit(self, done: StepRun, generation: PartialGeneration, planner: Planner) -> StepRun:
        run = generation.last
        assert run is not None and run.trained is not None
        self.state, self.learned = run.after, float(run.trained.tokens.sum())
        expected = planner.expected if self.space is not None else None
        more = f"{self.chosen[1]:.0%} more groups begun; " if self.chosen and self.chosen[1] else ""
        lag = (*[0.0] * (self.extra_lag + 1 - self.versions_in_step), *run.lag)
        return replace(done, policy=self.name, lag=lag, reason=f"partial rollouts: {more}{done.reason}", planned=expected)

    def _search(
        self, times: PhaseTimes, view: StepInput, planner: Planner, generation: PartialGeneration, space: SearchSpace
    ) -> StepPlanSettings:
        """Return the plan of a step, from scenarios of what is in flight."""

        def trial(rollout: str) -> Callable[[StepInput, StepPlanSettings], StepRun]:
            return lambda seen, plan: self.steps(times, seen, plan, generation, self.learned, rollout)

        given, planner.given = planner.given, view
        plan = planner.search(self.name, trial("ours"), trial(ROUGH_POLICY), space.begin(times), lambda plan: space.near(times, plan))
        planner.given = given
        return plan

    def _rollouts(self, times: PhaseTimes) -> int:
        """Return how many rollouts a response may outlive."""
        return times.setting.max_lag_steps - self.extra_lag

    def _choose(self, times: PhaseTimes, given: StepInput, planner: Planner) -> tuple[StepPlanSettings, float]:
        plans = self.plans(times)
        shares = MORE if self._rollouts(times) else (0.0,)
        base = planner.reference(planner.views()[0])
        prefer = planner.prefer if self.space is not None else 1.0

        def score(option: tuple[StepPlanSettings, float]) -> float:
            _, _, done = self._filled(times, given, *option, more_steps=TRIED)
            seconds, cost = (float(np.mean([getattr(k, name) for k in done[-TRIED:]])) for name in ("time_s", "full"))
            return prefer * seconds / base.time_s + (1 - prefer) * cost / base.full

        return min(((plan, share) for plan in plans for share in shares), key=score)

    def _filled(
        self, times: PhaseTimes, given: StepInput, plan: StepPlanSettings, share: float, more_steps: int = 0
    ) -> tuple[InFlight, float, list[StepRun]]:
        """Run steps on scenarios until groups have every age, and `more_steps` after that.

        Returns what is in flight then, the tokens of the last batch, and the steps.
        """
        outlives = self._rollouts(times)
        state, done = InFlight.empty(given, outlives, outlives + self.versions_in_step), []
        learned = float(given.scenarios.mean(1).sum() + given.prompts.sum())
        for k in range(self._rollouts(times) + 1 + more_steps):
            drawn = replace(given, lengths=given.scenarios[:, k % given.scenarios.shape[1]], is_trial=True, cache={})
            state = state.begin(drawn)
            if k == 0 and share:
                state = state.begin(replace(drawn, lengths=given.scenarios[:, -1]), round(share * state.quota))
            generation = PartialGeneration(state)
            done.append(self.steps(times, state.step_input(drawn, times.setting.response_limit), plan, generation, learned, ROUGH_POLICY))
            run = generation.last
            assert run is not None and run.after is not None and run.trained is not None
            state, learned = run.after, float(run.trained.tokens.sum())
        return state, learned, done


def _april(
    times: PhaseTimes, given: StepInput, plan: StepPlanSettings, generate: PartialGeneration, learned: float, rollout: str
) -> StepRun:
    d, times = times.devices, times.at(plan.width)
    run = generate(times, given, "fixed", engines=plan.engines, prefer=1.0, wake_s=times.warm_s)
    assert run.trained is not None
    tokens = float(run.trained.tokens.sum())
    after = times.prepare_s(tokens, d) + times.learn_s(tokens, d)
    end = run.end_s + after
    busy = min(run.busy(times.width) + after * d, end * d)
    wide = f"; engines of {plan.width} devices" * bool(plan.width)
    return StepRun("april", end, busy, run.end_s, 0, all_phases(d, end), f"{d} devices for everything{wide}")


def _separate(
    times: PhaseTimes, given: StepInput, plan: StepPlanSettings, generate: PartialGeneration, learned: float, rollout: str
) -> StepRun:
    d, m, times = times.devices, plan.late, times.at(plan.width)
    sent, learn = times.broadcast_s, times.prepare_s(learned, m) + times.learn_s(learned, m)
    run = generate(
        times,
        given,
        "fixed",
        engines=plan.engines,
        prefer=1.0,
        capacity=times.static_capacity,
        transfer_s=sent,
        wake_s=0.0,
        least_s=sent + learn,
    )
    end = max(run.end_s, sent + learn)
    busy = min(run.busy(times.width) + learn * m, end * d)
    return StepRun("fixed", end, busy, run.end_s, 0, separate_holds(d - m, m, end), describe_split(plan))


def _as_built(
    times: PhaseTimes, given: StepInput, plan: StepPlanSettings, generate: PartialGeneration, learned: float, rollout: str
) -> StepRun:
    """Simulate a step as the runtime does it, which takes no gradients before the rollout ends, only forward passes."""
    return elastic(times, given, plan, rollout=rollout, generate=generate, gradients=False)


def _is_built(plan: StepPlanSettings) -> bool:
    """Return whether the runtime can do this: its ranks do not change their number within a step."""
    return plan.early in (0, plan.late)


def _whole(times: PhaseTimes) -> list[StepPlanSettings]:
    """Return engines on all devices and learning on all of them, at every width."""
    return [StepPlanSettings(t.engines, 1.0, 0, t.devices, width=t.width if times.wider else 0) for t in times.widths]


def _halves(times: PhaseTimes) -> list[StepPlanSettings]:
    """Return plans like those that the search finds: a learner on about half of the devices beside engines on the others."""
    found = []
    for plan in _whole(times):
        t = times.at(plan.width)
        early = min(t.sizes(t.devices - t.width) or [0], key=lambda m: abs(m - t.devices / 2))
        engines = max(1, (t.devices - early) // t.width)
        found.append(replace(plan, prefer=PREFERS[-1], engines=engines, early=early, late=early, share=SHARES[0]))
    return [plan for plan in found if plan.early and fits(times, plan)]


def _either(times: PhaseTimes) -> list[StepPlanSettings]:
    """Return plans in which engines and learner take turns, and plans in which the learner works beside engines."""
    return _whole(times) + _halves(times)


def partial_policies() -> dict[str, Policy]:
    """Return the policies by name, with empty pipelines.

    `fixed` has separate pools that both work all the time, and engines that take new weights between two tokens: AReaL
    (arXiv 2505.24298), ROLL Flash (arXiv 2510.11345) and verl's fully asynchronous trainer. `april` holds all devices
    for one phase after the other, and ends the rollout when a batch is complete (arXiv 2509.18521). Ours gives devices
    back, and lets a learner of unchanged size work on complete groups beside the tail. Its gradients wait for the last
    response. `ours (ahead)` begins rollouts beside the update instead, as the runtime does with `rollout.ahead`.
    """
    beside = SearchSpace(candidates_ahead, neighbours_ahead)
    tail = SearchSpace(
        lambda times: list(filter(_is_built, candidates(times))), lambda times, plan: list(filter(_is_built, neighbours(times, plan)))
    )
    return {
        "fixed": Partial("fixed", _separate, splits, extra_lag=1),
        "april": Partial("april", _april, _whole),
        "ours": Partial("ours", _as_built, _either, space=tail),
        AHEAD: Partial(AHEAD, step_ahead, starts_ahead, extra_lag=1, space=beside, versions_in_step=2),
    }
