"""Choosing a step plan from forecasts alone: each candidate is tried on a scenario, and the best is kept for an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from placement.simulate.step import Knobs, StepInput, StepRun

DRAWS = 1  # scenarios that a candidate is tried on


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

    def views(self) -> list[StepInput]:
        """Scenarios of this step, as if they were the truth; the forecast shown with each is the others."""
        given, found = self.given, []
        for k in range(min(DRAWS, given.scenarios.shape[1])):
            rest = np.delete(given.scenarios, k, axis=1) if given.scenarios.shape[1] > 1 else given.scenarios
            found.append(StepInput(given.scenarios[:, k], given.prompts, given.group, rest, given.seed, view=True))
        return found

    def knobs(self, name: str, run: Callable[[StepInput, Knobs], StepRun], candidates: list[Knobs], prefer: float | None = None) -> Knobs:
        """The best candidate for this epoch, from forecasts."""
        if name not in self.chosen:
            self.chosen[name] = self._best(self.views(), run, candidates, self.prefer if prefer is None else prefer)
        return self.chosen[name]

    def clairvoyant(self, name: str, given: StepInput, run: Callable[[StepInput, Knobs], StepRun], candidates: list[Knobs]) -> Knobs:
        """The best candidate for this epoch, tried on the true lengths of its first step."""
        if name not in self.chosen:
            self.chosen[name] = self._best([replace(given, view=True, memo={})], run, candidates, self.prefer)
        return self.chosen[name]

    def _best(self, views: list[StepInput], run: Callable[[StepInput, Knobs], StepRun], candidates: list[Knobs], prefer: float) -> Knobs:
        base = [self.reference(view) for view in views]
        scores = np.zeros(len(candidates))
        seen = []
        for i, knobs in enumerate(candidates):
            done = [run(view, knobs) for view in views]
            scores[i] = sum(prefer * d.time_s / b.time_s + (1 - prefer) * d.full / b.full for d, b in zip(done, base, strict=True))
            seen.append((float(np.mean([d.time_s for d in done])), float(np.mean([d.full for d in done]))))
        best = int(np.argmin(scores))
        self.expected = seen[best]
        return candidates[best]
