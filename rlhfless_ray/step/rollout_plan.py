"""The plan of one step's rollout: how many engines, which responses each decodes, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from placement.planning.plan import Plan
from placement.scaling.overlapped_step import Update
from placement.scaling.resize_policy import Decision, assign_groups
from rlhfless_ray.common.json_types import JsonObject

MAX_SHOWN_POINTS = 24  # points of the frontier in metrics and report


@dataclass(frozen=True)
class Prediction:
    """A predicted quantity: by the fitted models alone, and corrected by what they missed before, with its central 90 % interval."""

    by_model: float = 0.0
    corrected: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class RolloutPlan:
    """A step's decision and the frontier it was chosen from. An empty frontier means that there was no choice; see `reason`."""

    decision: Decision
    actors: int
    frontier: tuple[Plan, ...] = ()
    rollout: Prediction = Prediction()  # seconds of the whole phase, with weight loads and engine calls
    cost: Prediction = Prediction()  # slot-seconds of its leases, including those that wait for the next phase
    step: Prediction = Prediction()  # seconds of the whole step, with scoring, learning and everything else
    width: int | None = None  # slots of an engine, where the planner chooses it
    update: Update | None = None  # beside the rollout, as predicted
    pools: tuple[str, ...] = ()  # pool of nodes of each engine of the decision, if there are several pools
    has_failed: bool = False  # whether planning failed, so that the size of the last good plan is kept

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the rollout."""
        return self.rollout.corrected

    @property
    def reason(self) -> str:
        return self.decision.reason

    def _repr_html_(self) -> str:
        from rlhfless_ray.report.inline import plan_html

        return plan_html(self.reason, self.frontier, self.decision.plan)

    def shares(self, engines: int, expected: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
        """Return the sequences of each of `engines` engines.

        These are the plan's groups. If fewer engines were granted, they are the groups of the frontier's largest plan that
        fits. Without one, whole prompts are dealt by expected tokens.
        """
        fitting = [plan for plan in (self.decision.plan, *self.frontier) if plan is not None and plan.actors <= engines]
        if self.decision.plan in fitting[:1]:
            return list(fitting[0].groups)
        best = max(fitting, key=lambda plan: plan.actors, default=None)
        return list(best.groups) if best is not None else assign_groups(expected, groups, engines)

    def metrics(self) -> JsonObject:
        points = self.frontier[:: -(-len(self.frontier) // MAX_SHOWN_POINTS)] if self.frontier else ()
        return {
            "plan/actors": self.actors,
            "pool/decision": self.decision.action,
            "pool/reason": self.reason,
            **{f"plan/{name}": value for name, value in self._predictions()},
            "plan/failed": self.has_failed,
            "plan/frontier_time_s": [plan.time_s for plan in points],
            "plan/frontier_cost_slot_s": [p.cost for p in points],
            "plan/frontier_actors": [plan.actors for plan in points],
            **({} if self.width is None else {"plan/width": self.width}),
            **{f"plan/pools/{pool}": count for pool, count in Counter(self.pools).items()},
        }

    def _predictions(self) -> Iterator[tuple[str, float]]:
        for what, unit, one in (("rollout", "s", self.rollout), ("cost", "slot_s", self.cost), ("step", "s", self.step)):
            yield from ((f"{what}_{unit}", one.corrected), (f"{what}_low_{unit}", one.low), (f"{what}_high_{unit}", one.high))
