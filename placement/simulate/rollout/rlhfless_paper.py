"""The assignment, scaling and local cut of the RLHFless paper."""

from __future__ import annotations

import numpy as np

from placement.migration.decide_moves import cut_at_share
from placement.simulate.rollout.view import Action, RolloutJob, View

TAU = 0.7


class RlhflessPaper:
    """Sort sequences by forecast length and give equal counts to each of N actors. Cut actors that are mostly done.

    RLHFless (arXiv 2602.22718): prompts are ranked by predicted length, and similar lengths share an actor. N minimises
    a weighted sum of predicted time and cost over all actor counts. `prefer` is the weight of time; both are normalised
    to their range over N, so that the weight sweeps from the cheapest N to the fastest. When the finished share of an
    actor reaches τ, its unfinished sequences move to other actors with free slots, and it is released. The paper
    studies τ and finds no saving left at 0.5 and below. Its default is not known to us; 0.7 is within the range it
    found useful. A slot is free where a sequence that the actor began with has ended. Receivers are the actors that
    will last longest, so that the move opens no new tail.
    """

    def __init__(self, job: RolloutJob) -> None:
        self.job = job
        self.forecast = job.scenarios.mean(1)
        self.order = np.argsort(self.forecast, kind="stable")
        self.actors = self.choose()
        self.size = np.zeros(0, int)

    def choose(self) -> int:
        """Return the N with the least weighted sum of predicted time and cost, over 1 … max_actors."""
        counts = range(1, min(self.job.max_actors, len(self.forecast)) + 1)
        times, costs = np.empty(len(counts)), np.empty(len(counts))
        for at, count in enumerate(counts):
            parts = np.array_split(self.order, count)
            each = [self.job.start_s + self.job.speed.rollout_s(self.forecast[p], self.job.prompts[p]) for p in parts]
            times[at], costs[at] = max(each), sum(each)
        score = self.job.prefer * normalise(times) + (1 - self.job.prefer) * normalise(costs)
        return counts[int(np.argmin(score))]

    def decide(self, view: View) -> Action | None:
        if view.time_s == 0:
            actor = np.empty(len(self.order), int)
            for a, part in enumerate(np.array_split(self.order, self.actors)):
                actor[part] = a
            self.size = np.bincount(actor, minlength=self.actors)
            return Action(actor, f"{self.actors} groups of similar forecast length")
        return self.cut(view)

    def cut(self, view: View) -> Action | None:
        """Empty each actor past τ whose unfinished sequences all fit into free slots elsewhere, shortest group first."""
        live, new = view.live, view.actor.copy()
        new[live] = cut_at_share(view.actor[live], self.size, TAU)
        cut = sorted(set(view.actor[live].tolist()) - set(new[live].tolist()))
        if not cut:
            return None
        return Action(new, f"{TAU:.0%} finished on actors {cut}: the rest moved to free slots")


def normalise(values: np.ndarray) -> np.ndarray:
    """Scale values to 0 … 1 over their range (all zero if they are equal)."""
    return (values - values.min()) / max(float(np.ptp(values)), 1e-12)
