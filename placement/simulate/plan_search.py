"""Choose a step plan from forecasts alone: candidates are tried on scenarios, and the best is kept for an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from placement.simulate.simulate_step import StepInput, StepPlanSettings, StepRun

DRAWS = 4  # scenarios that each of our candidates is tried on
FINALISTS = 5  # plans tried with the real rollout policy after the rough ranking
CLIMB = 24  # steps of local search from the best candidate
MIN_GAIN = 0.001  # relative gain that each of these steps must bring
STEADY = 0.9  # above this `prefer` a percent of time buys ten of cost or more, so a plan must prove its gain on other draws
PROOFS = 8  # of these


Trial = Callable[[StepInput, StepPlanSettings], StepRun]
Neighbours = Callable[[StepPlanSettings], list[StepPlanSettings]]


@dataclass
class Planner:
    """Chooses the candidate with the least prefer · time/time₀ + (1 - prefer) · cost/cost₀ on scenarios.

    time₀ and cost₀ are those of `reference` (all devices for everything). It never sees this step's lengths. There is
    one planner per run. A choice is kept until `renew` forgets it, at the start of an epoch, when forecasts have
    changed most.
    """

    given: StepInput
    prefer: float
    reference: Callable[[StepInput], StepRun]
    chosen: dict[str, StepPlanSettings] = field(default_factory=dict)
    expected: tuple[float, float] | None = None

    def renew(self, given: StepInput, *, forget: bool) -> None:
        """Set the step to plan for. forget: drop the choices made so far."""
        self.given = given
        if forget:
            self.chosen.clear()

    def views(self, draws: int = 1, without: int = 0) -> list[StepInput]:
        """Return scenarios of this step as if they were the truth, each with the other scenarios as its forecast.

        One draw is the first scenario. Several are spread evenly in the order of their longest response, which
        dominates a step's time. without: leave out those that `views(without)` returns.
        """
        given, found = self.given, []
        count = given.scenarios.shape[1]
        order = np.argsort(given.scenarios.max(0), kind="stable")
        if without:
            order = np.delete(order, _spread(count, without))
        chosen = [0] if draws == 1 else order[_spread(len(order), draws)]
        for k in chosen:
            rest = np.delete(given.scenarios, k, axis=1) if count > 1 else given.scenarios
            found.append(replace(given, lengths=given.scenarios[:, k], scenarios=rest, is_trial=True, cache={}))
        return found

    def choose(self, name: str, run: Trial, candidates: list[StepPlanSettings], prefer: float | None = None) -> StepPlanSettings:
        """Return the best candidate for this epoch, from forecasts."""
        if name not in self.chosen:
            trial = PlanTrials(self.views(), run, self.reference, self.prefer if prefer is None else prefer)
            self.chosen[name] = min(candidates, key=trial.score)
            self.expected = trial.expected(self.chosen[name])
        return self.chosen[name]

    def search(
        self,
        name: str,
        run: Trial,
        rough: Trial,
        candidates: list[StepPlanSettings],
        neighbours: Neighbours,
        truth: StepInput | None = None,
    ) -> StepPlanSettings:
        """Search the best step plan in three rounds, on `DRAWS` scenarios.

        First all candidates are tried by `rough`, which should rank them like `run` at a fraction of its cost. Then
        local search continues from the best as long as a neighbour is better. Last, the best of all that were tried are
        tried by `run`. truth: tried instead of scenarios, for the clairvoyant policy.

        A `prefer` above `STEADY` takes another plan than `STEADY` only if that is faster on draws that no search has
        seen. The best of some hundred plans on four draws is by chance a percent or two better than it will be, and so
        little time would buy a fifth of the cost.
        """
        if name not in self.chosen:
            views = self.views(DRAWS) if truth is None else [replace(truth, is_trial=True, cache={})]

            def best_for(prefer: float) -> StepPlanSettings:
                roughly = PlanTrials(views, rough, self.reference, prefer)
                best = min(candidates, key=roughly.score)
                for _ in range(CLIMB):
                    found = next((k for k in neighbours(best) if roughly.score(k) < (1 - MIN_GAIN) * roughly.score(best)), None)
                    if found is None:
                        break
                    best = found
                trial = PlanTrials(views, run, self.reference, prefer)
                return min(sorted(roughly.done, key=roughly.score)[:FINALISTS], key=trial.score)

            chosen = best_for(self.prefer)
            if truth is None and self.prefer > STEADY and chosen != (steady := best_for(STEADY)):
                proof = PlanTrials(self.views(PROOFS, without=DRAWS), run, self.reference, 1.0)
                chosen = chosen if proof.is_faster(chosen, steady) else steady
            self.chosen[name] = chosen
            self.expected = PlanTrials(views, run, self.reference, self.prefer).expected(chosen)
        return self.chosen[name]


def weigh(run: StepRun, base: StepRun, prefer: float) -> float:
    """Return prefer · time/time₀ + (1 - prefer) · cost/cost₀ of one step."""
    return prefer * run.time_s / base.time_s + (1 - prefer) * run.full / base.full


def _spread(count: int, draws: int) -> np.ndarray:
    """Return `draws` places spread evenly over `count`."""
    return (np.arange(1, draws + 1) * count) // (draws + 1)


class PlanTrials:
    """Step plans tried on scenarios, each once.

    The score is Σ prefer · time/time₀ + (1 - prefer) · cost/cost₀ over the views.
    """

    def __init__(self, views: list[StepInput], run: Trial, reference: Callable[[StepInput], StepRun], prefer: float) -> None:
        self.views, self.run, self.prefer = views, run, prefer
        self.base = [reference(view) for view in views]
        self.done: dict[StepPlanSettings, list[StepRun]] = {}

    def _try(self, plan: StepPlanSettings) -> list[StepRun]:
        if plan not in self.done:
            self.done[plan] = [self.run(view, plan) for view in self.views]
        return self.done[plan]

    def score(self, plan: StepPlanSettings) -> float:
        return sum(weigh(done, base, self.prefer) for done, base in zip(self._try(plan), self.base, strict=True))

    def is_faster(self, plan: StepPlanSettings, other: StepPlanSettings) -> bool:
        """Return whether a plan is faster by more than the standard error of its gain over the views."""
        gains = np.array([b.time_s - a.time_s for a, b in zip(self._try(plan), self._try(other), strict=True)])
        return bool(gains.mean() > gains.std(ddof=1) / np.sqrt(len(gains)))

    def expected(self, plan: StepPlanSettings) -> tuple[float, float]:
        """Return mean time and cost over the views."""
        done = self._try(plan)
        return float(np.mean([d.time_s for d in done])), float(np.mean([d.full for d in done]))
