"""Gather the long tail once, across all actors: RLHFuse's inter-stage fusion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.simulate.rollout.fixed import random_split
from placement.simulate.rollout.view import Action, RolloutJob, View, cost_weight_of

SHARES = np.r_[0.0, np.arange(1, 20) * 0.05]  # remaining shares tried as thresholds (0: never cut)


@dataclass(frozen=True)
class PlannedCut:
    """A planned cut: when at most `remaining` sequences are unfinished, gather them on `actors` actors."""

    remaining: int
    actors: int
    time_s: float
    cost: float


def plan_cut(job: RolloutJob, cost_weight: float) -> PlannedCut:
    """Find the threshold and number of target actors with the least expected time + cost_weight · cost.

    Searches SHARES × 1 … max_actors. The prediction uses the survival curve pooled over all scenarios: with s(j)
    survivors after j tokens, a step takes base + per_seq·s(j)/m on each of the m actors in use. Until the cut m is
    max_actors, or the number of sequences if that is smaller.
    """
    n, everyone = len(job.scenarios), min(job.max_actors, len(job.scenarios))
    pooled = np.sort(np.maximum(job.scenarios, 1).ravel())
    grid = np.linspace(0, pooled[-1], 513)
    middle, width = (grid[1:] + grid[:-1]) / 2, grid[1] - grid[0]
    alive = n * (1 - np.searchsorted(pooled, middle, side="right") / len(pooled))
    # expected actors still open: an actor closes when all of its sequences have ended
    speed, each = job.speed, n / everyone
    opened = everyone * (1 - np.power(1 - np.clip(alive / n, 0, 1), each))
    slowest = speed.base_s + speed.per_seq_s * np.minimum(alive, alive / everyone + 0.5 * np.sqrt(alive / everyone))
    best = None
    for share in SHARES:
        before = alive > share * n
        time = float(np.sum(slowest[before]) * width)
        cost = float(np.sum(speed.base_s * opened[before] + speed.per_seq_s * alive[before]) * width)
        tail = alive[~before]
        for m in range(1, everyone + 1):
            wait = job.migrate_s if share else 0.0
            more = float(np.sum(speed.base_s + speed.per_seq_s * tail / m) * width) + wait
            pay = float(np.sum(speed.base_s * np.minimum(m, np.maximum(tail, 1)) + speed.per_seq_s * tail) * width) + wait * m
            cut = PlannedCut(int(share * n), m, time + more, cost + pay)
            if best is None or cut.time_s + cost_weight * cut.cost < best.time_s + cost_weight * best.cost:
                best = cut
            if not share:
                break
    assert best is not None
    return best


class GlobalCut:
    """Generate on all actors, without regard to length. Once few enough sequences are left, gather them on a few actors.

    RLHFuse (arXiv 2409.13221, section 4, inter-stage fusion): when the number of unfinished samples falls to a
    threshold, the long-tailed ones migrate to a few generation instances, so that the rest may go to the next stage.
    The threshold is searched beforehand with a simulator over the length distribution. The targets are the instances
    that hold most of the remaining samples, which moves least.

    Here threshold and number of targets are searched together for time + cost_weight · cost over the forecast's pooled
    distribution, so that `prefer` sweeps both. Actors that run empty earlier are released as well. The paper does not
    ask for that, and it lowers the cost.
    """

    def __init__(self, job: RolloutJob) -> None:
        self.job = job
        self.cut = plan_cut(job, cost_weight_of(job))
        self.done = False

    def decide(self, view: View) -> Action | None:
        if view.time_s == 0:
            return Action(random_split(len(view.finished), self.job.max_actors, self.job.seed), f"{self.job.max_actors} actors")
        live = view.live
        if self.done or len(live) > self.cut.remaining:
            return None
        self.done = True
        held = np.bincount(view.actor[live], minlength=self.job.max_actors)
        keep = np.argsort(-held, kind="stable")[: min(self.cut.actors, int((held > 0).sum()))]
        return Action(gather(view.actor, live, keep), f"{len(live)} of {len(view.finished)} left: gathered on {len(keep)} actors")


def gather(actor: np.ndarray, live: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Move the `live` sequences of every actor outside `keep` to the actor in `keep` with the fewest."""
    new = actor.copy()
    load = {int(a): int((actor[live] == a).sum()) for a in keep}
    for i in live:
        if int(new[i]) not in load:
            new[i] = min(load, key=lambda a: (load[a], a))
            load[int(new[i])] += 1
    return new
