"""Where engines may work: in which pools of nodes, and on how many slots of each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from placement.pools import OWN
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.functions.node_pools import NodePools, not_on
from rlhfless_ray.functions.pool_messages import NODE_LABEL

EMPTY_S = 60.0  # interval of warnings about a pool without nodes


class EnginePools:
    """Where engines may have slots: in all pools, in `OWN` unless the recipe keeps engines off it and another pool has room for one."""

    def __init__(self, pools: NodePools, width: int, home: Callable[[], str | None], say: Callable[[str], None]) -> None:
        """`width`: least slots of an engine. `home`: returns the id of the learner's node, or None without a learner."""
        self.pools, self.width, self.home, self.say = pools, width, home, say
        self.said, self.warned_s = "", dict[str, float]()  # `warned_s`: time of the last warning, by pool without nodes
        self.working: Callable[[], Iterable[str]] = list  # returns the node of each engine that works

    @property
    def keeps_off_own(self) -> bool:
        return self.pools.kinds[-1].max_slots == 0

    def slots(self) -> dict[str, dict[str, int]]:
        """Return {pool: {node id: slots}} of the nodes on which engines may work now. Warns of pools without nodes."""
        found = self.pools.slots()
        if not self.keeps_off_own:
            self._warn_of_empty(found)
            return found
        labels = self.pools.kinds[0].labels
        if any(found[kind.name] for kind in self.pools.kinds[:-1]):
            self._tell("engines work on nodes labelled {} again" if self.said else "", labels)
            return found | {OWN: {}}
        home, others = self.home(), found[OWN]
        if home is not None and home not in others:  # lost too: the learner will start again on another one
            home = max(sorted(others), key=others.__getitem__, default=None)
        if home is None or others[home] < self.width:
            self._tell("no node labelled {} is left: engines wait for one, each for functions.lease_deadline_s at most", labels)
            return found | {OWN: {}}
        self._tell("no node labelled {} is left: engines work in this run's own slots until one joins", labels)
        return found | {OWN: {home: others[home]}}

    def labels(self) -> dict[str, str]:
        """Return the conditions on labels of any further engine's slots. Pools that have all engines that they may have are left out."""
        slots, full = self.slots(), self._full()
        if self.keeps_off_own:
            return {NODE_LABEL: next(iter(slots[OWN]))} if slots[OWN] else dict(self.pools.kinds[0].labels)
        return not_on([node for name in full for node in slots[name]]) if full else {}

    def limits(self, most: Mapping[int, int], least: int) -> Limits:
        """Return the limits of a plan that is made now."""
        slots = self.slots()
        by_node = {node: count for here in slots.values() for node, count in here.items()}
        pools = {node: name for name, here in slots.items() for node in here} if len(slots) > 1 else {}
        caps = {kind.name: kind.max_slots for kind in self.pools.kinds if kind.max_slots}
        return Limits(by_node, most, least, is_own=self.keeps_off_own and bool(slots[OWN]), pools=pools, caps=caps)

    def _full(self) -> list[str]:
        """Return the pools that may have no more engines."""
        used = Counter(self.pools.pool_of(node).name for node in self.working())
        caps = [(kind.name, kind.max_slots) for kind in self.pools.kinds if kind.max_slots]
        return [name for name, cap in caps if (used[name] + 1) * self.width > cap]

    def _tell(self, text: str, labels: Mapping[str, str]) -> None:
        if text and text != self.said:
            self.say(f"rollout.nodes: {text.format(dict(labels))}")
        self.said = text if text.startswith("no node") else ""

    def _warn_of_empty(self, slots: Mapping[str, Mapping[str, int]]) -> None:
        now = time.monotonic()
        for kind in self.pools.kinds[:-1]:
            if slots[kind.name]:
                if self.warned_s.pop(kind.name, None) is not None:
                    self.say(f"rollout.pools: pool {kind.name} has nodes again")
            elif now - self.warned_s.get(kind.name, -EMPTY_S) >= EMPTY_S:
                self.warned_s[kind.name] = now
                self.say(f"rollout.pools: no node of pool {kind.name} is there ({dict(kind.labels)}); engines work in the other pools")
