"""The clairvoyant policy: a mark to measure the others against."""

from __future__ import annotations

import numpy as np

from placement.planning.frontier import frontier
from placement.simulate.rollout.ours import Ours
from placement.simulate.rollout.run_policy import run
from placement.simulate.rollout.view import Action, RolloutJob, View, cost_weight_of


class Planned:
    """Assign sequences once, by a plan."""

    def __init__(self, groups: tuple[np.ndarray, ...], reason: str) -> None:
        self.groups, self.reason = groups, reason

    def decide(self, view: View) -> Action | None:
        if view.time_s > 0:
            return None
        actor = view.actor.copy()
        for a, group in enumerate(self.groups):
            actor[group] = a
        return Action(actor, self.reason)


class Oracle:
    """Clairvoyant: the better of our policy and of the exact frontier's plans, both given the true lengths.

    Both are run, and the one with less time + cost_weight · cost is taken. The plans have contiguous groups of the
    sorted lengths and move nothing. The job's only scenario is the truth, which no other policy is told.
    """

    def __init__(self, job: RolloutJob) -> None:
        lengths, cost_weight = job.scenarios[:, 0], cost_weight_of(job)
        plans = frontier(lengths, job.speed, max_actors=job.max_actors, capacity=job.capacity, prompts=job.prompts, thin=0.01)
        best = min(plans, key=lambda plan: plan.time_s + cost_weight * (plan.cost + job.start_s * len(plan.groups)))
        self.planned = Planned(best.groups, f"frontier plan on {len(best.groups)} actors")
        self.moving = Ours(job, is_known=True)
        results = [run(lengths, job, policy) for policy in (self.planned, self.moving)]
        scores = [result.time_s + cost_weight * result.cost for result in results]
        self.chosen: Planned | Ours = self.planned if scores[0] <= scores[1] else self.moving

    def decide(self, view: View) -> Action | None:
        return self.chosen.decide(view)
