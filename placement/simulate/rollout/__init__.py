"""Rollout policies. Each one answers `decide(view)` with the actor of every sequence."""

from __future__ import annotations

from collections.abc import Callable

from placement.simulate.rollout.consolidate import Consolidate, CrudeMix
from placement.simulate.rollout.fixed import Fixed, Random
from placement.simulate.rollout.global_cut import GlobalCut
from placement.simulate.rollout.oracle import Oracle
from placement.simulate.rollout.ours import Ours
from placement.simulate.rollout.rlhfless_paper import RlhflessPaper
from placement.simulate.rollout.view import Action, RolloutJob, RolloutPolicy, View, cost_weight_of

POLICIES: dict[str, Callable[[RolloutJob], RolloutPolicy]] = {
    "fixed": Fixed,
    "random": Random,
    "global-cut": GlobalCut,
    "rlhfless-paper": RlhflessPaper,
    "consolidate": Consolidate,
    "crude-mix": CrudeMix,
    "ours": Ours,
    "oracle": Oracle,
}
NAMES = tuple(POLICIES)


def make_policy(name: str, job: RolloutJob) -> RolloutPolicy:
    """Return the policy of this name, ready for one rollout of `job`."""
    return POLICIES[name](job)


__all__ = ["NAMES", "Action", "RolloutJob", "View", "cost_weight_of", "make_policy"]
