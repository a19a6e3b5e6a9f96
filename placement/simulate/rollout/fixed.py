"""Policies that place sequences once, at random, and move nothing."""

from __future__ import annotations

import numpy as np

from placement.simulate.rollout.view import Action, RolloutJob, View


def random_split(n: int, actors: int, seed: int) -> np.ndarray:
    """Return (n,) the actor of each sequence: counts equal to within one, membership at random."""
    return np.random.default_rng(seed).permutation(np.arange(n) % actors)


class Fixed:
    """Hold every actor for the whole rollout and split sequences into equal counts, without regard to length.

    As in VERL (HybridFlow, arXiv 2409.19256), which splits the generation batch evenly over data-parallel engines that
    hold their devices for the whole phase. `prefer` changes nothing.
    """

    def __init__(self, job: RolloutJob) -> None:
        self.job = job

    def decide(self, view: View) -> Action | None:
        if view.time_s > 0:
            return None
        everyone = frozenset(range(self.job.max_actors))
        split = random_split(len(view.finished), self.job.max_actors, self.job.seed)
        return Action(split, f"{self.job.max_actors} actors for the whole rollout", everyone)


class Random:
    """The same random split, but an actor is released when its last sequence ends.

    `prefer` sets the number of actors, geometric from 1 (prefer 0) to all (prefer 1). This is what a serverless
    launcher can do without any knowledge of lengths.
    """

    def __init__(self, job: RolloutJob) -> None:
        self.job = job
        self.actors = min(len(job.scenarios), max(1, round(job.max_actors**job.prefer)))

    def decide(self, view: View) -> Action | None:
        if view.time_s > 0:
            return None
        return Action(random_split(len(view.finished), self.actors, self.job.seed), f"{self.actors} actors, each until it is done")
