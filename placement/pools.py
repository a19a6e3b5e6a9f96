"""Pools of nodes: on which slots engines may work, what these cost, and how often they are preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OWN = "own"
"""Name of the pool of all nodes that belong to no other pool. It always exists, and is the last one."""
PREEMPTED = "preempted"
"""Activity in ledgers of a row about work that was lost with its node."""


@dataclass(frozen=True)
class PoolKind:
    """Nodes of one kind, by their labels. `Pool` is what the planner makes of one: with a speed and a number of actors.

    Parameters
    ----------
    name : str
        Unique among a run's pools.
    labels : mapping of str to str
        Labels that all of its nodes have. Empty for `OWN` only.
    price_per_hour : float
        Money per slot-hour.
    preempt_per_hour : float
        Expected preemptions of a node per hour, before a run has observed any.
    notice_s : float
        Seconds between the notice of a preemption and the end of the node. 0: it ends without notice.
    max_slots : int, optional
        Most slots that engines lease in it at once. None: as many as there are. 0: none, as long as another pool has room for an engine.
    width : int, optional
        Slots of one engine. None: as in the other pools.

    Examples
    --------
    >>> spot = PoolKind("spot", {"market": "spot"}, price_per_hour=0.8, preempt_per_hour=0.2, notice_s=120)
    >>> pools = (spot, PoolKind(OWN, price_per_hour=2.5))
    >>> pool_of({"market": "spot", "zone": "a"}, pools).name, pool_of({}, pools).name
    ('spot', 'own')
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    price_per_hour: float = 0.0
    preempt_per_hour: float = 0.0
    notice_s: float = 0.0
    max_slots: int | None = None
    width: int | None = None

    def has_node(self, labels: Mapping[str, str]) -> bool:
        """Return whether a node with these labels may belong to the pool."""
        return has_labels(labels, self.labels)


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether a node's labels meet all conditions, each as Ray writes it: `value`, `!value`, `in(a,b)` or `!in(a,b)`."""
    return all(_meets(labels.get(name), condition) for name, condition in wanted.items())


def _meets(value: str | None, condition: str) -> bool:
    positive = condition.removeprefix("!")
    listed = positive.removeprefix("in(").removesuffix(")").split(",") if positive.startswith("in(") else [positive]
    return (value in [one.strip() for one in listed]) is (positive == condition)


def pool_of(labels: Mapping[str, str], pools: Sequence[PoolKind]) -> PoolKind:
    """Return the first of `pools`, of which `OWN` is the last, that has nodes with these labels."""
    return next(pool for pool in pools if pool.has_node(labels))
