"""What the stages of a run share: the recipe, the books, and the leases on their way from one function to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhfless_ray.functions.instance import ProcessLost
from rlhfless_ray.phases import Phases
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Span

if TYPE_CHECKING:
    from rlhfless_ray.autoscale import Autoscaler
    from rlhfless_ray.functions.instance import Instance
    from rlhfless_ray.functions.lease import Lease, Leases
    from rlhfless_ray.functions.ledger import Ledger
    from rlhfless_ray.functions.pool import Pool
    from rlhfless_ray.record import Record


@dataclass
class Site:
    recipe: Recipe
    ledger: Ledger
    leases: Leases
    phases: Phases
    record: Record
    autoscaler: Autoscaler
    max_actors: int  # engines at most: what the recipe allows and the cluster has
    spare: list[Lease] = field(default_factory=list)  # between two functions

    def handed(self) -> list[Lease]:
        """The spare leases, for the next function to take."""
        leases, self.spare = self.spare, []
        return leases

    def told_start(self, instance: Instance) -> list[Span]:
        """A start that ended is told to the ledger once, while the instance still has its leases; its spans, else nothing."""
        if instance.opened is None or instance.memory_mb:
            return []
        told = instance.told(self.recipe.functions.lease_deadline_s)
        instance.memory_mb, instance.keeps_no_pages = told["memory_mb"], told.get("keeps_no_pages", "")
        self.ledger.spans([lease.id for lease in instance.leases], told["spans"])
        return told["spans"]

    def survived_start(self, pool: Pool, instance: Instance, told: Callable[[Instance], object]) -> bool:
        """Tells its start. One whose process was lost in it without having had work is done without: a fault, and no more."""
        try:
            told(instance)
        except ProcessLost as error:
            pool.lose(instance, str(error))
            return False
        return True
