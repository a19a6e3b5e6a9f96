"""What a run tells Ray's autoscaler that its cluster must hold, so that nodes come when a plan has work for them, and go again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ray.autoscaler.sdk import request_resources

from placement.pools import PoolKind
from rlhfless_ray.recipe import Recipe


@dataclass(frozen=True)
class Wanted:
    """Engines that a plan would have if nodes came for all that the recipe allows: their number by pool, and the slots of each.

    learner: slots that the learner holds beside them.
    """

    engines: Mapping[str, int] = field(default_factory=dict)
    width: int = 1
    learner: int = 0


class NoDemand:
    """Of a run that takes the nodes that are there."""

    def announce(self, wanted: Callable[[], Wanted]) -> None:
        pass

    def close(self) -> None:
        pass


class NodeDemand(NoDemand):
    """Announce slots to Ray's autoscaler. Ray keeps the newest announcement of a cluster, whoever made it, until there is another one.

    It asks for all slots that the cluster must have, whether these are in use or not. Placement groups that wait would be granted slots of
    the run's own between two phases.
    """

    def __init__(self, resource: str, kinds: Iterable[PoolKind]) -> None:
        """`resource`: "cpu" or "gpu"."""
        self.resource, self.labels = resource.upper(), {kind.name: dict(kind.labels) for kind in kinds}

    def announce(self, wanted: Callable[[], Wanted]) -> None:
        """Ask for nodes for these engines, instead of those that were announced before."""
        found = wanted()
        labels = [self.labels[pool] for pool, count in found.engines.items() for _ in range(count)]
        bundles = [{self.resource: found.width}] * len(labels) + [{self.resource: 1}] * found.learner
        request_resources(bundles=bundles, bundle_label_selectors=labels + [{}] * found.learner)

    def close(self) -> None:
        """Ask for nothing. Ray's autoscaler ends nodes that are idle for long enough."""
        request_resources(bundles=[])


def make_demand(recipe: Recipe, resource: str, kinds: Iterable[PoolKind]) -> NoDemand:
    return NodeDemand(resource, kinds) if recipe.functions.demand else NoDemand()
