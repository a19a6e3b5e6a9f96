"""The learner gang: its ranks' instances, staffed with leases for an update and parked between updates."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.instance import Instance, State, reason_of
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import UpdateStats, WeightVersion
from rlhfless_ray.waits import STOP, get

ATTEMPT_S = 5.0  # two gangs that each hold half of what both need let go after this long


class Gang:
    """`staff` → `update`, `publish`, `snapshot` → `park`. The optimizer lives in the instances, which stay parked."""

    def __init__(self, pool: Pool, recipe: Recipe) -> None:
        self.pool = pool
        self.ranks = recipe.learner.ranks
        more_threads = recipe.learner.max_slots_per_rank if pool.leases.resource == "cpu" else 1
        self.slots = recipe.learner.ranks * more_threads
        self.deadline_s = recipe.learner.deadline_s
        self.max_skipped = recipe.learner.max_skipped_updates
        self.skipped_in_a_row = 0
        self.by_rank: list[Instance] = []

    def staff(self, spare: list[Lease]) -> list[Lease]:
        """Hand leases to the ranks: one each, then more (threads, on CPU) as far as they are free. Returns the rest.

        Ranks stay where their state is: a lease of another node (on GPU: of another device) is of no use to them. A gang
        needs all its ranks at once. On a shared cluster another gang may hold what is missing here while it waits for what
        is held here: after a few seconds everything is let go, and asked for again at a random moment.
        """
        leases, start = self.pool.leases, time.monotonic()
        homes = self._homes()
        own, spare = self._own(spare)
        while missing := self.ranks - len(own):
            leases.release([lease for lease in spare if homes and lease.slot.node not in homes])
            spare = [lease for lease in spare if not homes or lease.slot.node in homes]  # on GPU: of the wrong device, so far
            asked = leases.ask(missing, self._homes(own))
            got = leases.collect(asked, "learn", ATTEMPT_S)
            own, spare = self._own([*own, *spare, *got])
            late = time.monotonic() - start > leases.deadline_s
            if len(own) == self.ranks or (len(got) == missing and not late):
                continue  # or all that was asked for came, but on GPU not yet the device
            leases.release([*own, *spare])
            own, spare = [], []
            if late:
                where = " on the nodes and devices that hold its state" if homes else ""
                raise RunError(
                    f"the learner gang needs {self.ranks} × {leases.bundle} at once{where} and did not get them within "
                    f"{leases.deadline_s:.0f} s; {leases.availability()}"
                )
            STOP.check()
            time.sleep(random.uniform(0.2, 1.0))
        shares = [[lease] for lease in own]
        spare = self._more_threads(shares, spare)
        staffed = [self.pool.staff(share) for share in shares]
        if not self.by_rank:
            self.by_rank = staffed
            self._opened()
        else:
            self._same_processes(staffed)
        return spare

    def _own(self, leases: list[Lease]) -> tuple[list[Lease], list[Lease]]:
        """One lease for each rank, as far as there are fitting ones, and the leases left over."""
        own: list[Lease] = []
        left = list(leases)
        ranks: list[Instance | None] = [*self.by_rank] or [None] * self.ranks
        for instance in ranks:
            found = next((lease for lease in left if instance is None or self.pool.fits(instance, lease.slot)), None)
            if found is not None:
                left.remove(found)
                own.append(found)
        return own, left

    def _homes(self, own: list[Lease] | tuple[()] = ()) -> list[str]:
        """The nodes of the ranks' processes, one entry a rank, without those that `own` serves; empty before they exist."""
        homes = [instance.slot.node for instance in self.by_rank]
        for lease in own if homes else ():
            homes.remove(lease.slot.node)
        return homes

    def _more_threads(self, shares: list[list[Lease]], spare: list[Lease]) -> list[Lease]:
        """Add leases of a rank's own node to its share, from the spare ones first; returns those that are left."""
        leases, most = self.pool.leases, self.slots // self.ranks

        def add(found: list[Lease]) -> list[Lease]:
            left = []
            for lease in found:
                here = [share for share in shares if share[0].slot.node == lease.slot.node and len(share) < most]
                min(here, key=len).append(lease) if here else left.append(lease)
            return left

        spare = add(spare)
        wanted = [share[0].slot.node for share in shares for _ in range(most - len(share))]
        if wanted := leases.with_room(wanted):
            # The first groups of a fresh cluster take Ray longer, and a warm start is worth every core.
            patience_s = 0.05 if self.by_rank else 2.0
            add(leases.collect(leases.ask(len(wanted), wanted), "learn", patience_s))
        return spare

    def _opened(self) -> None:
        for instance in self.by_rank:
            told = self._all([instance.opened], "the learner's start")[0]
            instance.memory_mb = told["memory_mb"]
            self._spans(instance, told["spans"])

    def _same_processes(self, staffed: list[Instance]) -> None:
        """Ranks keep their state, so the instances must be the ones there were, in any order."""
        if {id(i) for i in staffed} != {id(i) for i in self.by_rank}:
            raise RunError("the learner's leases fit other processes than those that hold its state")
        for instance in self.by_rank:
            instance.state = State.READY
        if self.pool.leases.resource == "gpu":
            refs = [instance.actor.unpark.remote() for instance in self.by_rank]
            for instance, spans in zip(self.by_rank, self._all(refs, "the learner's return to its device"), strict=True):
                self._spans(instance, spans)

    def park(self) -> list[Lease]:
        return self.pool.park_all()

    @property
    def working(self) -> bool:
        """Whether its ranks hold their leases."""
        return bool(self.pool.working)

    def fits(self, leases: list[Lease]) -> bool:
        """Whether these leases are enough for every rank, or the ranks have theirs."""
        return self.working or len(self._own(leases)[0]) == self.ranks

    # ---- work -------------------------------------------------------------------------------------------------

    def warm_start(self, files: Any, recipe: Recipe) -> dict[str, bytes]:
        first = self.by_rank[0]
        ref = first.actor.warm_start.remote(files, recipe.model_dump(), len(first.leases))
        content, spans = get(ref, self.deadline_s, "the supervised warm start")
        self._spans(first, spans)
        return content

    def build(self, files: Any, loopback: bool, state: Any) -> None:
        """Load the policy (or a checkpoint's state) into every rank and join them."""
        place = get(self.by_rank[0].actor.rendezvous.remote(loopback), self.deadline_s, "the gang's address")
        refs = [i.actor.build.remote(files, place, len(i.leases), state) for i in self.by_rank]
        for instance, spans in zip(self.by_rank, self._all(refs, "the learner to load the policy"), strict=True):
            self._spans(instance, spans)

    def update(self, batch: Batch, meanwhile: Callable[[], None] = lambda: None) -> UpdateStats:
        """One update on every rank; all of them report the same. `meanwhile` is called while they work. Raises RunError after
        too many skipped in a row."""
        shared = ray.put(batch)
        refs = [i.actor.update.remote(shared, len(i.leases)) for i in self.by_rank]
        meanwhile()
        replies = self._all(refs, "the learner's update")
        for instance, (_, spans) in zip(self.by_rank, replies, strict=True):
            self._spans(instance, spans)
        stats = replies[0][0]
        self.skipped_in_a_row = (0 if stats.applied else self.skipped_in_a_row) + stats.skipped_last
        if self.skipped_in_a_row > self.max_skipped:
            advice = "look at samples/" if "no sample" in stats.reason else "lower learner.learning_rate"
            raise RunError(
                f"{self.skipped_in_a_row} optimizer steps in a row were skipped (learner.max_skipped_updates = "
                f"{self.max_skipped}): {stats.reason}; {advice}"
            )
        return stats

    def logprobs(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities under the current weights and the estimated KL to the reference, per response token."""
        shared = ray.put(batch)
        refs = [i.actor.logprobs.remote(shared, len(i.leases)) for i in self.by_rank]
        replies = self._all(refs, "the learner's log-probabilities")
        for instance, (_, spans) in zip(self.by_rank, replies, strict=True):
            self._spans(instance, spans)
        return replies[0][0]

    def accumulate(self, batch: Batch) -> list[Any]:
        """Gradients of a part of a step, on every rank; references for `accumulated`."""
        shared = ray.put(batch)
        return [i.actor.accumulate.remote(shared, len(i.leases)) for i in self.by_rank]

    def pending(self, refs: list[Any]) -> list[Any]:
        """Those that are not there yet."""
        return ray.wait(refs, num_returns=len(refs), timeout=0)[1] if refs else []

    def accumulated(self, refs: list[Any]) -> None:
        """Wait for them. The ranks still hold the leases that they work under."""
        for instance, spans in zip(self.by_rank, self._all(refs, "the learner's gradients"), strict=True):
            self._spans(instance, spans)

    def publish(self, version: int) -> WeightVersion:
        """The current weights as a version that engines can pull. The arrays stay in the object store."""
        refs = [i.actor.weights.options(num_returns=2).remote() for i in self.by_rank]
        replies = self._all([told for _, told in refs], "the learner to publish weights")
        for instance, (_, spans) in zip(self.by_rank, replies, strict=True):
            self._spans(instance, spans)
        return WeightVersion(version, refs[0][0], replies[0][0])

    def snapshot(self, deadline_s: float | None = None) -> dict[str, bytes]:
        """Model, optimizer and random state as files. Works without leases too: it reads memory, on the host."""
        refs = [i.actor.snapshot.remote() for i in self.by_rank]
        return self._all(refs, "the learner's snapshot", deadline_s)[0]

    def _all(self, refs: list[Any], what: str, deadline_s: float | None = None) -> list[Any]:
        try:
            return get(refs, deadline_s or self.deadline_s, what)
        except ray.exceptions.RayTaskError as error:
            raise RunError(f"{what} failed: {reason_of(error)}") from error
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:
                raise RunError(f"{what} failed: {reason_of(error)}") from error
            raise RunError(f"{what} failed: a learner process died; continue from the last checkpoint with --resume") from error

    def _spans(self, instance: Instance, spans: list[Any]) -> None:
        self.pool.ledger.spans([lease.id for lease in instance.leases], spans)
