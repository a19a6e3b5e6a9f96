"""Consolidation by the square-root law: without forecasts, and with the forecast's order mixed in."""

from __future__ import annotations

import numpy as np

from placement.migration.decide_moves import relabel, square_root_law
from placement.simulate.rollout.view import Action, RolloutJob, View, cost_weight_of, per_seq_ratio


class Consolidate:
    """Spread live sequences evenly over as many actors as the square-root law asks for, never more than before.

    It forecasts nothing. `prefer` sets cost_weight. Where moves cost time it moves only when the law's number changes,
    and then as few sequences as balance needs. Where moves are free it spreads all requests again at every replan.
    """

    manner = "evenly"

    def __init__(self, job: RolloutJob, cost_weight: float | None = None) -> None:
        self.job = job
        self.cost_weight = cost_weight_of(job) if cost_weight is None else cost_weight
        self.most = job.max_actors

    def decide(self, view: View) -> Action | None:
        live = view.live
        context = float(np.mean((view.generated + self.job.prompts)[live]))
        unclipped = square_root_law(len(live), per_seq_ratio(self.job, context), self.cost_weight)
        wanted = int(np.clip(unclipped, 1, min(self.most, len(live))))
        changed, self.most = wanted < self.most or view.time_s == 0, wanted
        if self.job.migrate_s and not changed:
            return None
        actor = np.full(len(view.finished), -1)
        actor[live] = self.spread(view, live, wanted)
        return Action(
            actor, f"{len(live)} live sequences {self.manner} on {wanted} actors: square-root law at cost weight {self.cost_weight:.3g}"
        )

    def spread(self, view: View, live: np.ndarray, actors: int) -> np.ndarray:
        if self.job.migrate_s and view.time_s > 0:
            return rebalance(view.actor[live], actors)
        names = warmest_actors(view, actors)
        return np.repeat(names, [len(part) for part in np.array_split(live, actors)])


class CrudeMix(Consolidate):
    """Use as many actors as consolidation, but with loads growing from 1 to 6 in the order of expected remaining length.

    So sequences that are likely long decode on lightly loaded actors. The expectation is the mean of the scenarios that
    are still possible, and a short guess for a sequence that outlived all of its own. Where moves cost time it splits
    again only when the law's number changes.
    """

    manner = "in shares of 1 to 6, the likely-long on the light ones,"
    ratio = 6.0

    def spread(self, view: View, live: np.ndarray, actors: int) -> np.ndarray:
        order = np.argsort(-expected_left(self.job.scenarios[live], view.generated[live]))
        share = np.geomspace(1, self.ratio, actors)
        cuts = np.round(np.cumsum(share / share.sum()) * len(live)).astype(int)[:-1]
        group = np.empty(len(live), int)
        group[order] = np.searchsorted(cuts, np.arange(len(live)), side="right")
        return relabel(group, view.actor[live], tuple(view.ready_s), self.job.max_actors)


def expected_left(scenarios: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """Return (n,) expected remaining tokens: the mean over the scenarios (n, S) longer than `generated` (n,).

    Where there is none, 15 % of the generated tokens plus 5.
    """
    left = scenarios - generated[:, None]
    possible = left > 0
    count = possible.sum(1)
    return np.where(count > 0, np.where(possible, left, 0.0).sum(1) / np.maximum(count, 1), 0.15 * generated + 5)


def warmest_actors(view: View, actors: int) -> np.ndarray:
    """Return `actors` actor numbers: open ones first, those with most sequences first."""
    held = np.bincount(view.actor[view.live] + 1, minlength=view.job.max_actors + 1)[1:]
    opened = np.array([a in view.ready_s for a in range(view.job.max_actors)])
    return np.lexsort((-held, ~opened))[:actors]


def rebalance(actor: np.ndarray, actors: int) -> np.ndarray:
    """Spread sequences evenly over `actors` of the actors in use with the fewest moves.

    Actors with most sequences stay. Only what exceeds the even share moves.
    """
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
