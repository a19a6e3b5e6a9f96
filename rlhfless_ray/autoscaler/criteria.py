"""By what the plans of a run are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from placement.planning.objective import Objective
from rlhfless_ray.autoscaler.market_bids import MarketBids
from rlhfless_ray.recipe import ObjectiveConfig, Recipe

MIN_SECOND_VALUE = 1e-3  # slot-seconds per second of the step, for objectives that count cost only


@dataclass
class Criteria:
    """What plans are compared by, and the bounds within which they are made."""

    objective: Objective
    least: int  # the fewest engines of a plan; fewer if there are no slots for so many
    bids: MarketBids | None = None  # on a pool that the run shares with others
    value_per_s: float = 1.0  # value of a second of the step, in slot-seconds

    @classmethod
    def of(cls, recipe: Recipe) -> Criteria:
        return cls(_objective(recipe.objective), recipe.rollout.min_actors)

    def set_objective(self, goal: ObjectiveConfig) -> None:
        """Choose plans by another objective from now on."""
        self.objective = _objective(goal)
        if self.bids is not None:
            self.bids.objective = self.objective


def _objective(goal: ObjectiveConfig) -> Objective:
    if goal.knee or goal.deadline_s or goal.budget:
        return Objective(deadline_s=goal.deadline_s, budget=goal.budget, knee=goal.knee)
    return Objective(prefer=goal.prefer)
