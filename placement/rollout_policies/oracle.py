"""What a policy could reach that knows every length: the mark to measure the others against."""

from __future__ import annotations

from placement.frontier import frontier
from placement.rollout_policies.ours import Ours
from placement.rollout_policies.view import Action, Job, View, weight
from placement.rollout_run import run

CERTAIN = 0.01  # log-scale spread of a length that is known


class Planned:
    """Sequences dealt once, by a plan."""

    def __init__(self, groups: tuple, reason: str) -> None:
        self.groups, self.reason = groups, reason

    def decide(self, view: View) -> Action | None:
        if view.time_s > 0:
            return None
        actor = view.actor.copy()
        for a, group in enumerate(self.groups):
            actor[group] = a
        return Action(actor, self.reason)


class Oracle:
    """Clairvoyant: of our policy fed with the true lengths, and of the exact frontier's plans for them (contiguous groups of the
    sorted lengths, nothing moves), the one with less time + μ·cost when both are run.

    It is told the truth as the job's only scenario, which no other policy is.
    """

    def __init__(self, job: Job) -> None:
        lengths, mu = job.scenarios[:, 0], weight(job)
        plans = frontier(lengths, job.speed, max_actors=job.max_actors, capacity=job.capacity, prompts=job.prompts, thin=0.01)
        best = min(plans, key=lambda plan: plan.time_s + mu * (plan.cost + job.start_s * len(plan.groups)))
        self.planned = Planned(best.groups, f"frontier plan on {len(best.groups)} actors")
        self.moving = Ours(job, surprise=0.0, learn=False, least_spread=CERTAIN)
        results = [run(lengths, job, policy) for policy in (self.planned, self.moving)]
        scores = [result.time_s + mu * result.cost for result in results]
        self.chosen: Planned | Ours = self.planned if scores[0] <= scores[1] else self.moving

    def decide(self, view: View) -> Action | None:
        return self.chosen.decide(view)
