"""The instances of one function: resize, park, keep alive and replace them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import ray

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.failure_budget import FailureBudget, FailureCause
from rlhfless_ray.functions.instance import Instance, State, cause_of_loss
from rlhfless_ray.functions.kept_memory import begin_to_leave, give_back, record_kept, wait_until_left
from rlhfless_ray.functions.lease import PREFERRED_S, Labels, Lease, LeaseManager, Slot, whole_shares
from rlhfless_ray.functions.pool_messages import SlotRequest
from rlhfless_ray.functions.warm_memory_budget import WarmMemoryBudget

FAULTS = 3  # failure budget of a pool outside of a run
ATTEMPT_S = 5.0  # two runs that each hold half of what both need release it after this time
GRANT_S = 0.05  # wait for a slot that may be free: Ray takes milliseconds to grant one


class NoRoom(RunError):
    """No slot is free for an instance, and the run itself may hold the last one."""


class WorkerPool:
    """The instances of a function. An instance works under leases; without them it is parked until its keep-alive ends."""

    def __init__(
        self,
        kind: str,
        start: Callable[[Slot], Any],
        leases: LeaseManager,
        keep_alive_s: float,
        *,
        on_device: bool = False,
        leave_s: float = 60.0,
        waits_to_leave: bool = True,
        labels: Labels = dict,
        give_back_after_s: float = float("inf"),
        faults: FailureBudget | None = None,
        parked_memory: WarmMemoryBudget | None = None,
        width: int = 1,
    ) -> None:
        """Create an empty pool.

        `start(slot)` creates an actor. Its `open(threads)` must return {"memory_mb": …, "spans": […]}.
        `on_device`: on GPU, instances hold device memory. Their `park()` releases it within `leave_s` before they lose a lease, and
        returns what `open` does, including memory that stays on the device.
        `waits_to_leave`: whether parking waits for this. Otherwise those that need the device next wait, see `Lease.leaving`.
        `labels`: returns the node labels that slots must have now.
        `give_back_after_s`: on CPU, instances that are parked for longer release memory in the background, by the same `park()`. If
        earlier gaps were that long, or this is 0, they release it at once.
        `faults`: the run's failure budget (default: a new one). `parked_memory`: limits what the run's idle processes hold.
        `width`: leases of an instance, all of one node. It gets all of them or none.
        """
        self.kind = kind
        self.start = start
        self.leases = leases
        self.ledger = leases.ledger
        self.keep_alive_s = keep_alive_s
        self.on_device = on_device
        self.leave_s = leave_s
        self.waits_to_leave = waits_to_leave
        self.find_labels = labels
        self.give_back_after_s = float("inf") if self.is_bound else give_back_after_s
        self.faults = FailureBudget(FAULTS) if faults is None else faults
        self.parked_memory = parked_memory
        self.width = width
        self.working: list[Instance] = []
        self.parked: list[Instance] = []
        self.expected: list[SlotRequest] = []  # requests for the next resize
        self.replacements = 0  # number of lost instances whose work continues elsewhere
        self.gaps_s: deque[float] = deque(maxlen=64)  # seconds for which instances were parked before they were needed again
        self.cold_starts = 0
        self.looked_s = 0.0  # time of the last check for lost nodes
        if parked_memory is not None:
            parked_memory.watch(self)

    def set_width(self, width: int) -> None:
        """Use this many leases for each further instance. Instances of another width stay parked until their keep-alive ends."""
        assert width == self.width or not self.working, "instances of another width work"
        self.width = width

    # ---- size -------------------------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """Prepare a resize to `count`: request missing leases now, on nodes where parked instances wait.

        Leases that are held now are assumed to be handed over by then.
        """
        self.expected = self._ask_for_parked(self.count_missing(count))

    def count_missing(self, count: int) -> int:
        """Return how many of `count` instances the run's leases are not enough for, whoever works under them now."""
        return max(0, count - len(self._shares(self.leases.held.values())))

    def wake(self, count: int, wait_s: float, begin: Callable[[Instance], None]) -> None:
        """Let parked instances work on further slots that are granted within `wait_s`, until the run has leases for `count`."""
        waited_s = self.leases.waited_s
        asked = self._ask_for_parked(self.count_missing(count))
        self.leases.collect(asked, self.kind, wait_s, use=lambda leases: begin(self.assign_leases(leases)))
        self.leases.waited_s = waited_s  # no step waits for it

    def resize(
        self, count: int, spare: list[Lease], *, need: int = 1, wait_s: float = 0.0, begin: Callable[[Instance], None] = lambda _: None
    ) -> list[Lease]:
        """Work with `count` instances, and return the leases of `spare` that were not used.

        Spare leases are used first, preferably those of slots with a parked instance. The rest is requested: `need` instances must get
        their leases within the lease deadline, and it waits `wait_s` for more. `begin`: called with each instance as soon as it has
        its leases.
        """
        spare = self.leases.without_lost(spare)
        while len(self.working) > count:
            spare = [*spare, *self.park(self.working[-1])]
        expected, self.expected = [one for one in self.expected if one.id in self.leases.pending], []
        if need > 1 and self.width == 1 and len(self.working) + sum(map(self.may_use, spare)) < need:
            spare, expected = self._lease_together(need, spare, expected), []
        spare = self.begin(count, spare, begin)
        missing, urgent = max(0, count - len(self.working)), max(0, need - len(self.working))
        asked, incomplete = expected or self._ask_for_parked(missing), [lease for lease in spare if self.may_use(lease)]

        def start(leases: list[Lease]) -> None:
            begin(self.assign_leases(leases))

        self.leases.take(missing, self.kind, asked, urgent, wait_s, self.find_labels, start, self.width, incomplete)
        return [lease for lease in spare if lease.id in self.leases.held]

    def _lease_together(self, need: int, spare: list[Lease], expected: list[SlotRequest]) -> list[Lease]:
        """Return `spare` with the leases that `need` instances lack, which are needed at once. Raises RunError past the lease deadline.

        After ATTEMPT_S everything is released, also what instances hold that work already, see `LeaseManager.try_again`. `expected`:
        requests that were made before.
        """
        leases, start = self.leases, time.monotonic()
        while (missing := need - len(self.working) - sum(map(self.may_use, spare))) > 0:
            leases.withdraw([one for one in leases.pending.values() if one not in expected])  # they are for later
            got = leases.take(missing, self.kind, expected or self._ask_for_parked(missing), 0, ATTEMPT_S, self.find_labels)
            spare, expected = [*spare, *got], []
            if len(got) < missing:
                wanted = f"{self.kind} needs {need} × {leases.bundle} at once"
                leases.try_again(start, [*spare, *self.park_all()], wanted, 1, self.labels)
                spare = []
        return spare

    def begin(self, count: int, spare: list[Lease], begin: Callable[[Instance], None]) -> list[Lease]:
        """Work with up to `count` instances under valid spare leases, and return the leases left. `resize` does the rest."""
        shares = sorted(self._shares(spare), key=lambda share: self._find(self._slot(share)) is None)
        for share in shares[: max(0, count - len(self.working))]:
            begin(self.assign_leases(share))
            spare = [other for other in spare if other not in share]
        return spare

    def _shares(self, leases: Iterable[Lease]) -> list[list[Lease]]:
        return whole_shares([lease for lease in leases if self.may_use(lease)], self.width)

    def enough(self, leases: list[Lease]) -> bool:
        """Return whether these leases are enough for an instance."""
        return bool(self._shares(leases))

    def lease_one(self, need: bool, wait_s: float = 0.0) -> list[Lease]:
        """Return the leases of one more instance, or none if they are not granted within `wait_s` and not needed.

        Raises RunError past the lease deadline if they are needed.
        """
        asked = self._ask_for_parked(1) if need else None
        return self.leases.take(1, self.kind, asked, int(need), wait_s, self.find_labels, width=self.width)

    def _ask_for_parked(self, count: int) -> list[SlotRequest]:
        """Request the leases of up to `count` instances on nodes with parked ones."""
        return self.leases.ask_preferred(count, [instance.slot.node for instance in self.parked], self.labels, self.width)

    def assign_leases(self, leases: list[Lease]) -> Instance:
        """Assign leases of one node to a fitting parked instance (warm start), or to a new one."""
        slot = self._slot(leases)
        instance = self._find(slot)
        if instance is not None:
            self._left(instance)
        if self.on_device:
            for lease in leases:
                lease.wait_until_left()
        if instance is None:
            instance = Instance(self.kind, slot, self.start(slot), width=self.width)
            self.cold_starts += 1
        else:
            self.parked.remove(instance)
            record_kept(instance, self.ledger)
            instance.kept_mb = instance.giving_back = None
            self.gaps_s.append(time.monotonic() - instance.parked_since_s)
            self.ledger.unpark(instance.id)
            instance.slot = slot
            instance.state = State.STALE
        instance.leases = leases
        for lease in leases:
            self.leases.hand_over(lease, self.kind, instance.id)
        if instance.opened is None:
            instance.state = State.STARTING
            instance.opened = instance.actor.open.remote(len(leases))
        self.working.append(instance)
        return instance

    @property
    def labels(self) -> dict[str, str]:
        return self.find_labels()

    def may_use(self, lease: Lease) -> bool:
        labels = self.labels
        return not labels or lease.slot.node in self.leases.nodes.slots(labels)

    def fits(self, instance: Instance, slot: Slot) -> bool:
        """Return whether the instance can use the slot: its own device if it holds memory of one, otherwise any slot of its node."""
        return instance.slot == slot or (not self.is_bound and instance.slot.node == slot.node)

    def count_warm(self, width: int, places: Collection[tuple[str, str]]) -> int:
        """Return how many parked instances of this width have started before and can work.

        `places`: nodes and devices that can be had, which only matter to processes that are bound to their devices.
        """
        warm = [instance for instance in self.parked if instance.memory_mb > 0 and instance.width == width]
        return sum(not self.is_bound or instance.slot.places <= set(places) for instance in warm)

    @property
    def is_bound(self) -> bool:
        """Whether a process can only work on the device on which it has started."""
        return self.on_device and self.leases.resource == "gpu"

    def _slot(self, leases: list[Lease]) -> Slot:
        """Return the slot of an instance with these leases. On GPU it names all devices, as CUDA_VISIBLE_DEVICES does."""
        first = leases[0].slot
        if self.width == 1 or self.leases.resource == "cpu":
            return first
        return Slot(first.node, ",".join(sorted(str(lease.slot.device) for lease in leases)))

    def _find(self, slot: Slot) -> Instance | None:
        return next((i for i in self.parked if i.width == self.width and self.fits(i, slot)), None)

    def prewarm(self, slot: Slot) -> Instance | None:
        """Start a process ahead of its lease: imports only, no device memory. It is parked.

        Returns None if the node's memory budget does not allow it.
        """
        if self.parked_memory is not None and not self.parked_memory.admits(self, slot.node):
            return None
        instance = Instance(self.kind, slot, self.start(slot), state=State.PARKED, parked_since_s=time.monotonic(), width=self.width)
        self._book(instance)
        self.parked.append(instance)
        if self.give_back_after_s < float("inf"):
            give_back(instance)  # nothing to release yet, but the reply contains its memory
        return instance

    # ---- parking and ending -----------------------------------------------------------------------------------

    def park(self, instance: Instance) -> list[Lease]:
        """Park an instance and return its leases, which the caller hands on or releases."""
        return self._park([instance])

    def park_all(self) -> list[Lease]:
        return self._park(list(self.working))

    def _park(self, instances: list[Instance]) -> list[Lease]:
        if self.is_bound:
            self._leave_devices(instances)
        taken: list[Lease] = []
        long = self.give_back_after_s == 0 or (bool(self.gaps_s) and statistics.median(self.gaps_s) > self.give_back_after_s)
        for instance in instances:
            self.working.remove(instance)
            taken += instance.leases
            instance.leases = []
            instance.state = State.PARKED
            instance.parked_since_s = time.monotonic()
            self.parked.append(instance)
            self._book(instance)
            if long:
                give_back(instance)
        if self.parked_memory is not None:
            self.parked_memory.enforce()
        return taken

    def _book(self, instance: Instance) -> None:
        self.ledger.park(instance.id, instance.slot.node, str(instance.slot.device), self.kind, *instance.parked_memory)

    @property
    def hold_price(self) -> float:
        """Average price of its parked processes, as a share of a slot's price."""
        return self.ledger.hold_price(instance.id for instance in self.parked)

    def _leave_devices(self, instances: list[Instance]) -> None:
        """Make all instances leave their devices at the same time, because they may need each other for it."""
        for instance in instances:
            begin_to_leave(instance)
        for instance in instances:
            if self.waits_to_leave:
                self._left(instance)
            else:
                for lease in instance.leases:
                    lease.leaving = partial(self._left, instance)

    def _left(self, instance: Instance) -> None:
        wait_until_left(instance, self.leave_s, self.ledger)

    def end_expired(self, worth_s: float = float("inf"), look_every_s: float = 0.0) -> int:
        """End parked instances whose keep-alive is over, that are not worth keeping, or whose node is gone; return their number.

        Ray is queried at most every `look_every_s`, because that takes milliseconds. Other instances release memory when it is
        time.
        """
        now, keep_s = time.monotonic(), min(self.keep_alive_s, worth_s)
        lost: set[str] = set()
        if self.parked and now - self.looked_s >= look_every_s:
            self.looked_s = now
            lost = set(self.leases.nodes.find_lost([i.slot.node for i in self.parked])) | self.leases.nodes.draining()
        for instance in self.parked:
            if instance.leaving is not None and ray.wait([instance.leaving[0]], timeout=0, fetch_local=False)[0]:
                self._left(instance)
        # not while it leaves its device: a process that is killed holds memory of it for a moment, unseen
        over = [i for i in self.parked if i.slot.node in lost or (i.leaving is None and now - i.parked_since_s > keep_s)]
        for instance in over:
            self.end(instance)
        for instance in self.parked:
            if instance.giving_back is None and now - instance.parked_since_s > self.give_back_after_s:
                self.ledger.unpark(instance.id)  # a new row for the new amount
                self._book(instance)
                give_back(instance)
            elif instance.kept_mb is None:
                record_kept(instance, self.ledger)
        if self.parked_memory is not None:
            self.parked_memory.enforce()  # other runs may need the memory by now
        return len(over)

    def end(self, instance: Instance) -> None:
        """End an instance. The caller decides about its leases."""
        instance.state = State.GONE
        ray.kill(instance.actor, no_restart=True)
        self.ledger.unpark(instance.id)
        self.parked = [i for i in self.parked if i is not instance]
        self.working = [i for i in self.working if i is not instance]

    def cause(self, *instances: Instance) -> FailureCause:
        """Determine why one of these does not respond."""
        return cause_of_loss(instances, self.leases.nodes)

    def replace(
        self,
        instance: Instance,
        why: str = "",
        cause: FailureCause | None = None,
        make_room: Callable[[], None] | None = None,
        *,
        waits: bool = True,
    ) -> Instance:
        """Replace a failed instance under the same leases. Its process is killed first, because it may only seem dead.

        Raises RunError, with `why`, when the failure budget is used up.

        `cause`: if it is known already. `make_room`: called before a wait for new leases, to release some that the run itself holds.
        `waits`: otherwise it raises NoRoom if no slot is free, because the run itself may hold the last one.
        """
        leases = self.leases.without_lost(self._handle_loss(instance, why, cause))
        if not leases and make_room is not None and not (leases := self.lease_one(need=False, wait_s=GRANT_S)):
            make_room()
        if not leases and not waits and not (leases := self.lease_one(need=False, wait_s=PREFERRED_S)):
            raise NoRoom(f"{instance.id} is lost, and no slot is free for a successor")
        return self.assign_leases(leases or self.lease_one(need=True))

    def end_lost(self, instance: Instance, why: str = "", cause: FailureCause | None = None) -> None:
        """Remove a failed instance without replacement, and release its leases. Raises as `replace` does."""
        self.leases.release(self._handle_loss(instance, why, cause))

    def _handle_loss(self, instance: Instance, why: str, cause: FailureCause | None) -> list[Lease]:
        leases, cause = instance.leases, cause or self.cause(instance)
        self.end(instance)
        self.replacements += 1
        self.faults.count(instance.id, cause, why)
        return leases

    def leave(self, instance: Instance) -> None:
        """End an idle instance on a node that is drained, and release its lease."""
        leases = instance.leases
        self.end(instance)
        self.ledger.preempted(self.kind, instance.id, instance.slot.node, str(instance.slot.device), 0.0)
        self.leases.release(leases)
        self.faults.count(instance.id, FailureCause.NODE_DRAINED)

    def close(self) -> list[Lease]:
        """End every instance, and return their leases."""
        leases = [lease for instance in self.working for lease in instance.leases]
        for instance in [*self.working, *self.parked]:
            self.end(instance)
        del self.start  # it refers to objects (config, files) that would keep their node busy
        return leases
