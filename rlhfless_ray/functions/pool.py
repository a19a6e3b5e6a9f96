"""The instances of one function: resized under leases, parked, kept alive, replaced."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.faults import Cause, Faults
from rlhfless_ray.functions.instance import GONE, Instance, State, actor_state, reason_of
from rlhfless_ray.functions.lease import Lease, Leases, Request, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.parked import ParkedMemory
from rlhfless_ray.waits import get

FAULTS = 3  # that a pool on its own survives
KNOWN_S = 5.0  # until Ray knows that a process or a node is gone


class Pool:
    """Every instance works under leases it was handed; without one it is parked until its keep-alive ends."""

    def __init__(
        self, kind: str, start: Callable[[Slot], Any], leases: Leases, ledger: Ledger, keep_alive_s: float,
        *, on_device: bool = False, leave_s: float = 60.0, labels: dict[str, str] | None = None,
        give_back_after_s: float = float("inf"),
    ) -> None:
        """`start(slot)` makes the actor; its `open(threads)` must return {"memory_mb": …, "spans": […]}.

        `on_device`: on GPU its instances hold device memory, which their `park()` gives back within `leave_s` before a lease
        is taken from them. It returns the same as `open`, with what stays on the device counted in. `labels`: that the nodes
        it works on must have. `give_back_after_s`: who is parked for longer than that gives memory back where there is no device
        to leave, by the same `park()`, which then needs no lease and for which nobody waits; at once where the gaps so far say so.
        """
        self.kind = kind
        self.start = start
        self.leases = leases
        self.ledger = ledger
        self.keep_alive_s = keep_alive_s
        self.on_device = on_device
        self.leave_s = leave_s
        self.labels = labels or {}
        self.give_back_after_s = float("inf") if on_device and leases.resource == "gpu" else give_back_after_s
        self.faults = Faults(FAULTS)  # of the run, where there is one
        self.parked_memory: ParkedMemory | None = None  # what the pools of a run may hold without work
        self.working: list[Instance] = []
        self.parked: list[Instance] = []
        self.expected: list[Request] = []  # for the next resize
        self.replacements = 0  # instances that died, and what they had to do goes on elsewhere
        self.gaps_s: deque[float] = deque(maxlen=64)  # for how long instances lay parked before they were needed again
        self.warm_starts = 0
        self.cold_starts = 0
        self.looked_s = 0.0  # for nodes that are gone

    # ---- size -------------------------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """A resize to `count` comes next: Ray is asked for what the run will lack then where parked instances wait, so that it is
        there. Whoever holds a lease now hands it over by then."""
        missing = count - sum(self.may_use(lease) for lease in self.leases.held.values())
        nodes = self.leases.with_room([instance.slot.node for instance in self.parked])[: max(0, missing)]
        self.expected = self.leases.ask(len(nodes), nodes, self.labels)

    def resize(
        self, count: int, spare: list[Lease], *, need: int = 1, wait_s: float = 0.0,
        begin: Callable[[Instance], None] = lambda _: None,
    ) -> list[Lease]:
        """Work with `count` instances, one lease each; returns the leases of `spare` that were not used.

        Spare leases are handed over first, those of slots with a parked instance before others; Ray is asked for the
        rest: `need` instances in all must be staffed within the lease deadline, for more it waits `wait_s`. `begin`: what each
        is told as soon as it is staffed, while others still wait for their leases.
        """
        spare = self.leases.living(spare)
        while len(self.working) > count:
            spare = [*spare, *self.park(self.working[-1])]
        spare = self.begin(count, spare, begin)
        missing, urgent = max(0, count - len(self.working)), max(0, need - len(self.working))
        expected, self.expected = [one for one in self.expected if one.id in self.leases.asked], []
        prefer = [instance.slot.node for instance in self.parked]
        got = self.leases.take(missing, self.kind, prefer, urgent, wait_s, self.labels, expected)
        for lease in got:
            begin(self.staff([lease]))
        return spare

    def begin(self, count: int, spare: list[Lease], begin: Callable[[Instance], None]) -> list[Lease]:
        """Work with up to `count` instances, as far as there are spare leases that live; the leases left. A resize does the rest."""
        usable = sorted((lease for lease in spare if self.may_use(lease)), key=lambda lease: self._find(lease.slot) is None)
        for lease in usable[: max(0, count - len(self.working))]:
            begin(self.staff([lease]))
            spare = [other for other in spare if other is not lease]
        return spare

    def resume(self, instance: Instance, spare: list[Lease]) -> list[Lease]:
        """A parked instance goes on, under a spare lease or one that its node gives within the lease deadline; the leases left. Raises
        RunError past it."""
        own = [lease for lease in spare if self.fits(instance, lease.slot)][:1]
        asked = [] if own else self.leases.ask(1, [instance.slot.node])
        self.staff(own or self.leases.collect(asked, self.kind, self.leases.deadline_s, need=1), instance)
        return [lease for lease in spare if lease not in own]

    def staff(self, leases: list[Lease], instance: Instance | None = None) -> Instance:
        """An instance for these leases of one node: this parked one, or the one of the slot (warm start), else a new one."""
        slot = leases[0].slot
        instance = instance or self._find(slot)
        if instance is None:
            instance = Instance(self.kind, slot, self.start(slot))
            self.cold_starts += 1
        else:
            self.parked.remove(instance)
            self._gave_back(instance)
            instance.kept_mb = instance.giving_back = None
            self.gaps_s.append(time.monotonic() - instance.parked_since_s)
            self.ledger.unpark(instance.id)
            self.warm_starts += instance.opened is not None
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

    def may_use(self, lease: Lease) -> bool:
        return not self.labels or lease.slot.node in self.leases.matching(self.labels)

    def fits(self, instance: Instance, slot: Slot) -> bool:
        """Whether the instance can work there. On CPU anywhere on its node; on GPU on its device only, where its memory was."""
        return instance.slot == slot or (self.leases.resource == "cpu" and instance.slot.node == slot.node)

    def _find(self, slot: Slot) -> Instance | None:
        return next((instance for instance in self.parked if self.fits(instance, slot)), None)

    def prewarm(self, slot: Slot) -> Instance | None:
        """Start a process ahead of its lease: imports only, no device memory. It waits as parked. None: its node has no memory for
        that."""
        if self.parked_memory is not None and not self.parked_memory.admits(self, slot.node):
            return None
        instance = Instance(self.kind, slot, self.start(slot), state=State.PARKED, parked_since_s=time.monotonic())
        self._book(instance)
        self.parked.append(instance)
        if self.give_back_after_s < float("inf"):
            self._give_back(instance)  # it has nothing to give yet, but tells what it holds
        return instance

    # ---- parking and ending -----------------------------------------------------------------------------------

    def park(self, instance: Instance) -> list[Lease]:
        """Take the leases from an instance; the caller hands them on or releases them. Its process stays warm."""
        return self._park([instance])

    def park_all(self) -> list[Lease]:
        return self._park(list(self.working))

    def _park(self, instances: list[Instance]) -> list[Lease]:
        if self.on_device and self.leases.resource == "gpu":
            self._leave_devices(instances)
        taken: list[Lease] = []
        long = bool(self.gaps_s) and statistics.median(self.gaps_s) > self.give_back_after_s
        for instance in instances:
            self.working.remove(instance)
            taken += instance.leases
            instance.leases = []
            instance.state = State.PARKED
            instance.parked_since_s = time.monotonic()
            self.parked.append(instance)
            self._book(instance)
            if long:
                self._give_back(instance)
        if self.parked_memory is not None:
            self.parked_memory.enforce()
        return taken

    def _book(self, instance: Instance) -> None:
        self.ledger.park(instance.id, instance.slot.node, str(instance.slot.device), self.kind, *instance.parked_memory)

    @property
    def hold_price(self) -> float:
        """What one of its parked processes costs, as a share of a slot's price."""
        return self.ledger.hold_price(instance.id for instance in self.parked)

    def _give_back(self, instance: Instance) -> None:
        instance.giving_back = instance.actor.park.remote()

    def _gave_back(self, instance: Instance) -> None:
        """If it has by now: what it keeps is written down, from when it was parked on."""
        if instance.giving_back is None or not ray.wait([instance.giving_back], timeout=0)[0]:
            return
        try:
            instance.kept_mb = ray.get(instance.giving_back)["memory_mb"]
        except GONE:  # a process that died holds nothing: who needs it next will see
            return
        except RayTaskError as error:
            raise RunError(f"{instance.id} could not give memory back: {reason_of(error)}") from error
        self.ledger.kept(instance.id, *instance.parked_memory)

    def _leave_devices(self, instances: list[Instance]) -> None:
        """All at once, for they may need one another for it. An engine's weights are lost with its device's memory, so it has
        no version any more. A process that died holds nothing: who needs it next will see."""
        leaving = [(instance, instance.actor.park.remote()) for instance in instances]
        for instance, ref in leaving:
            instance.version = None
            try:
                told = get(ref, self.leave_s, f"{instance.id} to leave its device")
            except GONE:
                continue
            except RayTaskError as error:
                raise RunError(f"{instance.failure() or f'{instance.id} could not leave its device: {reason_of(error)}'}") from error
            instance.kept_mb = told["memory_mb"]
            self.ledger.spans([lease.id for lease in instance.leases], told["spans"])

    def reap(self, worth_s: float = float("inf"), look_every_s: float = 0.0) -> int:
        """End the parked instances whose keep-alive is over, or who were kept for longer than they are worth it, or whose
        node is gone (asked of Ray every `look_every_s` at most: it takes milliseconds); how many. The others give back memory
        when it is time."""
        now, keep_s = time.monotonic(), min(self.keep_alive_s, worth_s)
        lost: set[str] = set()
        if self.parked and now - self.looked_s >= look_every_s:
            self.looked_s = now
            lost = set(self.leases.gone([i.slot.node for i in self.parked])) | self.leases.draining()
        over = [i for i in self.parked if now - i.parked_since_s > keep_s or i.slot.node in lost]
        for instance in over:
            self.end(instance)
        for instance in self.parked:
            if instance.giving_back is None and now - instance.parked_since_s > self.give_back_after_s:
                self.ledger.unpark(instance.id)  # another row, for another amount
                self._book(instance)
                self._give_back(instance)
            elif instance.kept_mb is None:
                self._gave_back(instance)
        return len(over)

    def end(self, instance: Instance) -> None:
        """For good. What becomes of its leases is the caller's business."""
        instance.state = State.GONE
        ray.kill(instance.actor, no_restart=True)
        self.ledger.unpark(instance.id)
        self.parked = [i for i in self.parked if i is not instance]
        self.working = [i for i in self.working if i is not instance]

    def cause(self, *instances: Instance) -> Cause:
        """Why one of these does not answer any more. A connection may break before Ray knows what happened: what still seems to
        live after some seconds hangs."""
        end = time.monotonic() + KNOWN_S
        while True:
            if any(self.leases.lose(node) for node in {instance.slot.node for instance in instances}):
                return Cause.NODE_LOST
            ended = [for_memory for alive, for_memory in (actor_state(i.actor) for i in instances) if not alive]
            if ended:
                return Cause.MEMORY if any(ended) else Cause.DIED
            if time.monotonic() > end:
                return Cause.HUNG
            time.sleep(0.05)

    def replace(self, instance: Instance, why: str = "", cause: Cause | None = None) -> Instance:
        """A dead instance's leases get a new one. The process is killed first: it may only look dead. Raises RunError, with `why`,
        when the run's budget for faults is used up. `cause`: where it is known already."""
        leases = self.leases.living(self._bury(instance, why, cause))
        if not leases:
            leases = self.leases.take(1, self.kind, [other.slot.node for other in self.parked], labels=self.labels)
        return self.staff(leases)

    def lose(self, instance: Instance, why: str = "", cause: Cause | None = None) -> None:
        """A dead instance has no successor for now: others go on with its work. Its leases go back. Raises as `replace` does."""
        self.leases.release(self._bury(instance, why, cause))

    def _bury(self, instance: Instance, why: str, cause: Cause | None) -> list[Lease]:
        leases, cause = instance.leases, cause or self.cause(instance)
        self.end(instance)
        self.replacements += 1
        self.faults.count(instance.id, cause, why)
        return leases

    def leave(self, instance: Instance) -> None:
        """An instance without work goes, with its lease, from a node that is drained."""
        leases = instance.leases
        self.end(instance)
        self.leases.release(leases)
        self.faults.count(instance.id, Cause.NODE_DRAINED)

    def close(self) -> list[Lease]:
        """End every instance, for good; returns their leases."""
        leases = [lease for instance in self.working for lease in instance.leases]
        for instance in [*self.working, *self.parked]:
            self.end(instance)
        del self.start  # what it refers to (config, files) lies in the object store of a node that is to become idle
        return leases
