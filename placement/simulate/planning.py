"""Choosing a step plan from forecasts alone: each candidate is tried on a scenario, and the best is kept for an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from placement.simulate.step import Knobs, StepInput, StepRun

DRAWS = 4  # scenarios that a candidate of ours is tried on
FINALISTS = 5  # plans that are tried in earnest after all were tried roughly
CLIMB = 24  # steps from the best candidate
LEAST_GAIN = 0.001  # that a step must bring


Try = Callable[[StepInput, Knobs], StepRun]
Beside = Callable[[Knobs], list[Knobs]]


@dataclass
class Planner:
    """Chooses among candidates with the least prefer · time/time₀ + (1 - prefer) · cost/cost₀, where time₀ and cost₀ are
    those of `reference` (all devices for everything), on scenarios: it never sees this step's lengths.

    One per run. A choice is kept until `renew` is called (at the start of an epoch, when forecasts have changed most).
    """

    given: StepInput
    prefer: float
    reference: Callable[[StepInput], StepRun]
    chosen: dict[str, Knobs] = field(default_factory=dict)
    expected: tuple[float, float] | None = None

    def renew(self, given: StepInput, *, forget: bool) -> None:
        self.given = given
        if forget:
            self.chosen.clear()

    def views(self, draws: int = 1) -> list[StepInput]:
        """Scenarios of this step, as if they were the truth; the forecast shown with each is the others. One is the first;
        more are typical ones, evenly among all in the order of their longest response, which most of a step's time follows."""
        given, found = self.given, []
        count = given.scenarios.shape[1]
        order = np.argsort(given.scenarios.max(0), kind="stable")
        chosen = [0] if draws == 1 else order[(np.arange(1, draws + 1) * count) // (draws + 1)]
        for k in chosen:
            rest = np.delete(given.scenarios, k, axis=1) if count > 1 else given.scenarios
            found.append(StepInput(given.scenarios[:, k], given.prompts, given.group, rest, given.seed, view=True))
        return found

    def knobs(self, name: str, run: Try, candidates: list[Knobs], prefer: float | None = None) -> Knobs:
        """The best candidate for this epoch, from forecasts."""
        if name not in self.chosen:
            trial = Trials(self.views(), run, self.reference, self.prefer if prefer is None else prefer)
            self.chosen[name] = min(candidates, key=trial.score)
            self.expected = trial.expected(self.chosen[name])
        return self.chosen[name]

    def searched(
        self, name: str, run: Try, rough: Try, candidates: list[Knobs], beside: Beside, truth: StepInput | None = None
    ) -> Knobs:
        """The same in three rounds, on `DRAWS` scenarios: all candidates by `rough`, which should rank them much like `run` at a
        fraction of its cost; from the best on to a plan beside it as long as that is better; and the best of all that were
        tried by `run`. truth: tried instead of scenarios, for the clairvoyant."""
        if name not in self.chosen:
            views = self.views(DRAWS) if truth is None else [replace(truth, view=True, memo={})]
            roughly = Trials(views, rough, self.reference, self.prefer)
            best = min(candidates, key=roughly.score)
            for _ in range(CLIMB):
                found = next((k for k in beside(best) if roughly.score(k) < (1 - LEAST_GAIN) * roughly.score(best)), None)
                if found is None:
                    break
                best = found
            trial = Trials(views, run, self.reference, self.prefer)
            self.chosen[name] = min(sorted(roughly.done, key=roughly.score)[:FINALISTS], key=trial.score)
            self.expected = trial.expected(self.chosen[name])
        return self.chosen[name]


class Trials:
    """Step plans tried on scenarios, each once. score: Σ prefer · time/time₀ + (1 - prefer) · cost/cost₀ over views."""

    def __init__(self, views: list[StepInput], run: Try, reference: Callable[[StepInput], StepRun], prefer: float) -> None:
        self.views, self.run, self.prefer = views, run, prefer
        self.base = [reference(view) for view in views]
        self.done: dict[Knobs, list[StepRun]] = {}

    def _try(self, knobs: Knobs) -> list[StepRun]:
        if knobs not in self.done:
            self.done[knobs] = [self.run(view, knobs) for view in self.views]
        return self.done[knobs]

    def score(self, knobs: Knobs) -> float:
        pairs = zip(self._try(knobs), self.base, strict=True)
        return sum(self.prefer * d.time_s / b.time_s + (1 - self.prefer) * d.full / b.full for d, b in pairs)

    def expected(self, knobs: Knobs) -> tuple[float, float]:
        """Mean time and cost over the views."""
        done = self._try(knobs)
        return float(np.mean([d.time_s for d in done])), float(np.mean([d.full for d in done]))
