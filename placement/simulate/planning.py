"""Choosing a step plan from forecasts alone: each candidate is tried on a scenario, and the best is kept for an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from placement.simulate.step import Knobs, StepInput, StepRun

DRAWS = 2  # scenarios that a candidate of ours is tried on
FINALISTS = 10  # candidates that are tried in earnest after all were tried roughly


Try = Callable[[StepInput, Knobs], StepRun]


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
            self.chosen[name] = self._best(self.views(), run, candidates, self.prefer if prefer is None else prefer)
        return self.chosen[name]

    def searched(self, name: str, run: Try, rough: Try, candidates: list[Knobs], truth: StepInput | None = None) -> Knobs:
        """The same in two rounds, on `DRAWS` scenarios: all candidates by `rough`, which should rank them much like `run` at a
        fraction of its cost, then the best of them by `run`. truth: tried instead of scenarios, for the clairvoyant."""
        if name not in self.chosen:
            views = self.views(DRAWS) if truth is None else [replace(truth, view=True, memo={})]
            scores = self._scores(views, rough, candidates, self.prefer)[0]
            finalists = [candidates[i] for i in np.argsort(scores, kind="stable")[:FINALISTS]]
            self.chosen[name] = self._best(views, run, finalists, self.prefer)
        return self.chosen[name]

    def _best(self, views: list[StepInput], run: Try, candidates: list[Knobs], prefer: float) -> Knobs:
        scores, seen = self._scores(views, run, candidates, prefer)
        best = int(np.argmin(scores))
        self.expected = seen[best]
        return candidates[best]

    def _scores(
        self, views: list[StepInput], run: Try, candidates: list[Knobs], prefer: float
    ) -> tuple[np.ndarray, list[tuple[float, float]]]:
        base = [self.reference(view) for view in views]
        scores = np.zeros(len(candidates))
        seen = []
        for i, knobs in enumerate(candidates):
            done = [run(view, knobs) for view in views]
            scores[i] = sum(prefer * d.time_s / b.time_s + (1 - prefer) * d.full / b.full for d, b in zip(done, base, strict=True))
            seen.append((float(np.mean([d.time_s for d in done])), float(np.mean([d.full for d in done]))))
        return scores, seen
