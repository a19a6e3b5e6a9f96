"""Consolidation by the square-root law: without forecasts, and with the forecast's order crudely mixed in."""

from __future__ import annotations

import numpy as np

from placement.migrate import relabel
from placement.rollout_policies.view import Action, Job, View, slope, weight


def law(live: int, ratio: float, mu: float) -> int:
    """Actors for `live` sequences: ceil(sqrt(ratio·live/μ)), ratio = per_seq/base. If all sequences advance together on m
    actors, a step takes base + per_seq·live/m and costs m·base + per_seq·live; this m minimises time + μ·cost."""
    return int(np.ceil(np.sqrt(ratio * live / mu)))


class Consolidate:
    """All live sequences advance together, spread evenly over as many actors as the square-root law asks for, never more
    than before. It forecasts nothing; its knob is μ.

    Moves are counted, so where they cost time it moves only when the law's number changes, and then as few as balance
    needs; where they are free it spreads anew at every replan.
    """

    word = "evenly"

    def __init__(self, job: Job, mu: float | None = None) -> None:
        self.job = job
        self.mu = weight(job) if mu is None else mu
        self.most = job.max_actors

    def decide(self, view: View) -> Action | None:
        live = view.live
        context = float(np.mean((view.generated + self.job.prompts)[live]))
        asked = law(len(live), slope(self.job, context), self.mu)
        wanted = int(np.clip(asked, 1, min(self.most, len(live))))
        changed, self.most = wanted < self.most or view.time_s == 0, wanted
        if self.job.migrate_s and not changed:
            return None
        actor = np.full(len(view.finished), -1)
        actor[live] = self.spread(view, live, wanted)
        return Action(actor, f"{len(live)} live sequences {self.word} on {wanted} actors: square-root law at μ = {self.mu:.3g}")

    def spread(self, view: View, live: np.ndarray, actors: int) -> np.ndarray:
        if self.job.migrate_s and view.time_s > 0:
            return rebalance(view.actor[live], actors)
        names = labels(view, actors)
        return np.repeat(names, [len(part) for part in np.array_split(live, actors)])


class CrudeMix(Consolidate):
    """As many actors as consolidation uses, but loads grow from 1 to 6 in the order of expected remaining length, so that the
    likely-long decode on lightly loaded actors. Its knob is μ.

    The expectation is the mean of the scenarios that are still possible, and a short guess for a sequence that outlived
    all of its own. Where moves cost time it deals anew only when the law's number changes.
    """

    word = "in shares of 1 to 6, the likely-long on the light ones,"
    ratio = 6.0

    def spread(self, view: View, live: np.ndarray, actors: int) -> np.ndarray:
        order = np.argsort(-expected_left(self.job.scenarios[live], view.generated[live]))
        share = np.geomspace(1, self.ratio, actors)
        cuts = np.round(np.cumsum(share / share.sum()) * len(live)).astype(int)[:-1]
        group = np.empty(len(live), int)
        group[order] = np.searchsorted(cuts, np.arange(len(live)), side="right")
        return relabel(group, view.actor[live], tuple(view.ready_s), self.job.max_actors)


def expected_left(scenarios: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """(n,) tokens still expected: the mean over the scenarios (n, S) longer than `generated` (n,), 15 % of what was generated
    plus 5 where there is none."""
    left = scenarios - generated[:, None]
    possible = left > 0
    count = possible.sum(1)
    return np.where(count > 0, np.where(possible, left, 0.0).sum(1) / np.maximum(count, 1), 0.15 * generated + 5)


def labels(view: View, actors: int) -> np.ndarray:
    """`actors` actor numbers, the open ones with most sequences first: they are warm."""
    held = np.bincount(view.actor[view.live] + 1, minlength=view.job.max_actors + 1)[1:]
    opened = np.array([a in view.ready_s for a in range(view.job.max_actors)])
    return np.lexsort((-held, ~opened))[:actors]


def rebalance(actor: np.ndarray, actors: int) -> np.ndarray:
    """Spread evenly over `actors` of the actors in use with the fewest moves: those with most sequences stay, and only what is
    above the even share goes."""
    new = actor.copy()
    held = np.bincount(actor)
    keep = np.argsort(-held, kind="stable")[: min(actors, int((held > 0).sum()))]
    target = np.full(len(keep), len(actor) // len(keep))
    target[: len(actor) % len(keep)] += 1
    pool = list(np.flatnonzero(~np.isin(actor, keep)))
    for a, most in zip(keep, target, strict=True):
        pool.extend(np.flatnonzero(actor == a)[most:])
    for a, most in zip(keep, target, strict=True):
        take = most - min(most, int(held[a]))
        new[pool[:take]] = a
        pool = pool[take:]
    return new
