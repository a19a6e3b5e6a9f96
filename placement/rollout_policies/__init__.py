"""The rollout policies, each of which answers `decide(view)` with where every sequence goes."""

from __future__ import annotations

from placement.rollout_policies.consolidate import Consolidate, CrudeMix
from placement.rollout_policies.fixed import Fixed, Random
from placement.rollout_policies.global_cut import GlobalCut
from placement.rollout_policies.oracle import Oracle
from placement.rollout_policies.ours import Ours
from placement.rollout_policies.rlhfless_paper import RlhflessPaper
from placement.rollout_policies.view import Action, Job, View, prefer_of, weight

POLICIES = {
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


def make_policy(name: str, job: Job) -> object:
    """The policy of this name, ready for one rollout of `job`."""
    return POLICIES[name](job)


__all__ = ["NAMES", "Action", "Job", "View", "make_policy", "prefer_of", "weight"]
