"""The assignment, scaling and local cut that the RLHFless paper describes."""

from __future__ import annotations

import numpy as np

from placement.rollout_policies.view import Action, Job, View

TAU = 0.7


class RlhflessPaper:
    """Sequences sorted by forecast length, equal counts to each of N actors; an actor most of whose sequences have finished
    hands the rest to other actors with free slots and is released.

    RLHFless (arXiv 2602.22718): prompts are ranked by predicted length and similar lengths share an actor; N minimises a
    weighted sum of predicted time and cost, each normalised, over all actor counts (`prefer` is the weight of time; each is
    normalised to its range over N, so that the weight sweeps from the cheapest N to the fastest); when the finished share of
    an actor reaches τ its unfinished sequences move to other actors with free slots. The paper studies τ and finds no saving left
    at 0.5 and below; its default is not known to us, 0.7 is within the range it found useful. A slot is free where a sequence
    that the actor began with has ended; receivers are those that will last longest, so that the move opens no new tail.
    """

    def __init__(self, job: Job, tau: float = TAU) -> None:
        self.job = job
        self.tau = tau
        self.forecast = job.scenarios.mean(1)
        self.order = np.argsort(self.forecast, kind="stable")
        self.actors = self.choose()
        self.size = np.zeros(0, int)

    def choose(self) -> int:
        """N with the least weighted sum of predicted time and cost, over 1 … max_actors."""
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
        live = view.live
        held = np.bincount(view.actor[live], minlength=self.actors)
        share = 1 - held / np.maximum(self.size, 1)
        new, cut = view.actor.copy(), []
        for a in range(self.actors):
            others = [b for b in range(self.actors - 1, -1, -1) if b != a and held[b] and b not in cut]
            free = {b: int(self.size[b] - held[b]) for b in others}
            if not held[a] or share[a] < self.tau or sum(free.values()) < held[a]:
                continue
            receivers = [b for b in others for _ in range(free[b])]
            for i, b in zip(live[new[live] == a], receivers, strict=False):
                new[i] = b
                held[b] += 1
            held[a] = 0
            cut.append(a)
        if not cut:
            return None
        return Action(new, f"{self.tau:.0%} finished on actors {cut}: the rest moved to free slots")


def normalise(values: np.ndarray) -> np.ndarray:
    """Values scaled to 0 … 1 over their range (all zero where there is none)."""
    return (values - values.min()) / max(float(np.ptp(values)), 1e-12)
