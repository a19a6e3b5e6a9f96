"""How many engines a plan may have: where they may work, read from the cluster for each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rlhfless_ray.functions.cluster_nodes import ClusterNodes
from rlhfless_ray.functions.lease import Lease, most_instances

NODE_LABEL = "ray.io/node-id"  # Ray's own label


@dataclass(frozen=True)
class Limits:
    """The limits of one plan. Pure.

    A shared pool divides these slots among its runs by their bids, see `MarketBids`.
    """

    slots: Mapping[str, int]  # node id → slots, of the nodes on which engines may work
    most: Mapping[int, int]  # width → engines that the recipe allows
    least: int = 1  # rollout.min_actors
    is_own: bool = False  # whether only the run's own node is left, although it lacks the labels of rollout.nodes

    def engines(self, width: int, held: Iterable[Lease] = ()) -> int:
        """Return the most engines of `width` slots beside the leases `held`."""
        return min(self.most.get(width, 0), most_instances(self.slots, width, held))

    def fewest(self, width: int) -> int:
        """Return the fewest engines for which a rollout waits. The run's own node may have slots for fewer than the recipe wants."""
        return max(1, min(self.least, self.engines(width))) if self.is_own else self.least

    def since(self, before: Limits, width: int) -> str:
        """Describe what has changed since earlier limits, or return an empty string."""
        changes = [self.slots.get(node, 0) - before.slots.get(node, 0) for node in {**before.slots, **self.slots}]
        joined, left = sum(n for n in changes if n > 0), -sum(n for n in changes if n < 0)
        parts = [f"{n} slot{'s' * (n > 1)} {verb}" for n, verb in ((joined, "joined"), (left, "left")) if n]
        if self.is_own != before.is_own:
            parts = ["only the run's own node is left" if self.is_own else "nodes with the labels of rollout.nodes are back"]
        count, cap = self.engines(width), self.most.get(width, 0)
        limited = " (rollout.max_actors)" if count == cap < most_instances(self.slots, width) else ""
        return f"{' and '.join(parts)}: the pool may be {count}{limited}" if parts else ""


class EngineNodes:
    """The nodes on which engines may work: those with the labels of `rollout.nodes`, or while there is none, the learner's node."""

    def __init__(
        self, nodes: ClusterNodes, labels: dict[str, str], width: int, home: Callable[[], str | None], say: Callable[[str], None]
    ) -> None:
        """`width`: least slots of an engine. `home`: returns the id of the learner's node, or None without a learner."""
        self.nodes, self.wanted, self.width, self.home, self.say = nodes, labels, width, home, say
        self.said = ""

    def find(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return {node id: slots} and the labels that the engines' slots must have now. Tells the user when these change."""
        slots = self.nodes.slots(self.wanted)
        if slots or not self.wanted:
            self._tell("engines work on nodes labelled {} again" if self.said else "")
            return slots, self.wanted
        home, others = self.home(), self.nodes.slots({})
        if home is not None and home not in others:  # lost too: the learner will start again on another one
            home = max(sorted(others), key=others.__getitem__, default=None)
        if home is None or others[home] < self.width:
            self._tell("no node labelled {} is left: engines wait for one, each for functions.lease_deadline_s at most")
            return {}, self.wanted
        self._tell("no node labelled {} is left: engines work in this run's own slots until one joins")
        return {home: others[home]}, {NODE_LABEL: home}

    def _tell(self, text: str) -> None:
        if text and text != self.said:
            self.say(f"rollout.nodes: {text.format(self.wanted)}")
        self.said = text if text.startswith("no node") else ""

    def labels(self) -> dict[str, str]:
        """Return the labels that the engines' slots must have now."""
        return self.find()[1]

    def limits(self, most: Mapping[int, int], least: int) -> Limits:
        """Return the limits of a plan that is made now."""
        slots, labels = self.find()
        return Limits(slots, most, least, is_own=labels != self.wanted)
