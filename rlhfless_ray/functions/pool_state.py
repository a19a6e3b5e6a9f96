"""The state of a cluster's shared slots: which run holds which slot, which waits, and which pays. Pure; `slot_pool.py` acts on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import replace

from placement.market import Bid, Clearing, Credits, clear, entitled_slots, exact_slots
from placement.pools import has_labels
from rlhfless_ray.functions.pool_messages import NODE_LABEL, SILENT_S, PoolSlot, PoolView, RunInfo, SlotRequest, Statement
from rlhfless_ray.functions.pool_runs import PastRun, PoolRun

# A slot that no run takes for this long goes back to Ray. What a rollout lets go is wanted again after the update.
# Ray takes up to 0.8 s to grant a slot again, and 10 ms or more to name its device.
IDLE_S = 30.0
SOUGHT_S = 1.0  # the least such time on a node of which a run wants one device, or several at once: until Ray has granted the others
WARM_IDLE_S = 300.0  # the same for a device to which parked processes are bound: on another one a process has to start
RECENT_S = 2.0  # a run that withdrew a request counts as waiting for this long: worker groups repeat requests after a short pause
HEARD_S = 5.0  # a run with a message in this time is alive: it sends one every second
HANDOVER_S = 0.05  # longest hand-over on CPU, for the market's payback
MAX_PAST = 1000  # number of ended runs whose cost is kept


class PoolState:
    """The pool's state. All methods take the current time in seconds, from the same clock."""

    def __init__(self, now_s: float) -> None:
        self.runs: dict[str, PoolRun] = {}
        self.slots: dict[str, PoolSlot] = {}
        self.leased: dict[str, PoolSlot] = {}  # those that runs hold, by lease id
        self.requests: dict[str, SlotRequest] = {}  # oldest first
        self.nodes: dict[str, tuple[int, Mapping[str, str]]] = {}  # id → slots and labels
        self.credits = Credits()
        self.past: list[PastRun] = []
        self.free_slot_s = 0.0  # slot-seconds that no run paid for
        self.day = 0  # UTC day, in days since the epoch
        self.handovers = 0  # slots that passed from one run to another without Ray
        self.silent_s = SILENT_S
        self._at_s = now_s
        self._cleared: Clearing | None = None

    # ---- runs ---------------------------------------------------------------------------------------------------

    def refusal(self, info: RunInfo, now_s: float, is_alive: Callable[[str], bool] = lambda job: False, *, is_new: bool = True) -> str:
        """Return why a run cannot join, or an empty string.

        `is_alive`: whether a job's driver is alive. `is_new`: otherwise it joins again, perhaps with fewer nodes than there were.
        """
        if (known := self.runs.get(info.run)) is not None:  # it has died if it resumes, but another machine may have a folder of this path
            is_heard = known.info.job != info.job and now_s - known.heard_s < HEARD_S and is_alive(known.info.job)
            if is_heard or known.info.folder != info.folder:
                return f"run.name: a run in a folder named {info.run} is on this cluster already"
        if is_new and info.least > self.size:
            return f"the run needs {info.least} slots at once, but the pool has {self.size}"
        taken = {run.info.run: run.info.share for run in self.runs.values() if run.info.share is not None and run.info.run != info.run}
        if info.share is not None and (total := sum(taken.values()) + info.share) > 1 + 1e-9:
            others = ", ".join(f"{name}: {share:g}" for name, share in sorted(taken.items()))
            return f"cluster.share: {info.share:g} and the shares of other runs ({others}) add up to {total:g}, more than the pool"
        return ""

    def join(
        self, info: RunInfo, now_s: float, held: Iterable[PoolSlot] = (), before: PoolView | None = None, session: str = ""
    ) -> list[str]:
        """Add a run that is not refused. Returns the ids of those of its slots that other runs hold by now.

        `held`: slots that it holds already. `before`: its last view of the pool if it joins again: what it has paid, lent and borrowed.
        """
        self.leave(info.run, now_s)
        bid = Bid(info.run, (info.least,), (0.0,), info.share, info.weight)
        run = self.runs[info.run] = PoolRun(info, session, bid, now_s, now_s)
        if before is not None:  # the run goes on, so its costs must not also count as an ended run's, with the time of its silence
            ended = [past for past in self.past if past.info == info]
            self.past = [past for past in self.past if past.info != info]
            run.slot_s = max([before.slot_s, *(past.slot_s for past in ended)])
            run.today_slot_s = max([before.today_slot_s if before.day == self.day else 0.0, *(past.today_slot_s for past in ended)])
            run.lent_slot_s, run.borrowed_slot_s = before.lent_slot_s, before.borrowed_slot_s
            self.credits = self.credits.restored(info.run, run.lent_slot_s - run.borrowed_slot_s, self.size)
        gone = []
        for slot in held:
            known = self.slots.setdefault(slot.id, slot)
            if known is not slot and known.holder:
                gone.append(slot.id)
            else:
                known.last = info.run  # not a hand-over
                self._give(known, info.run, slot.request, now_s)
        self._cleared = None
        return gone

    def leave(self, run: str, now_s: float) -> None:
        """Remove a run: free its slots and withdraw its requests."""
        self.account(now_s)
        known = self.runs.pop(run, None)
        if known is None:
            return
        self.requests = {id: request for id, request in self.requests.items() if request.run != run}
        for slot in self.slots.values():
            if slot.holder == run:
                self._free(slot, now_s)
        self.past = [*self.past, PastRun(known.info, known.joined_s, now_s, known.slot_s, known.today_slot_s)][-MAX_PAST:]
        balance = {name: amount for name, amount in self.credits.balance.items() if name != run}
        self.credits, self._cleared = Credits(balance), None

    def tell(self, statement: Statement, now_s: float) -> None:
        """Set a run's requests, slots and bid from its statement, unless a newer statement has arrived."""
        run = self.runs[statement.run]
        run.heard_s = now_s
        if statement.number <= run.number:
            return
        run.number, run.holds, run.avoids = statement.number, frozenset(statement.holds), statement.avoids
        run.parked_mb, run.warm = statement.parked_mb, statement.warm
        run.gives_at_s = None if statement.gives_s is None else now_s + statement.gives_s
        known = [request.id for request in self.requests.values() if request.run == statement.run]
        known += [slot.request for slot in self.slots.values() if slot.holder == statement.run]
        wanted = {id for request in statement.wants for id in (request.id, *request.ids)}
        self.release(set(known) - run.holds - wanted, now_s, statement.paid_s)
        for request in statement.wants:
            self.ask(request, now_s)
        if statement.bid is not None:
            self.bid(statement.bid, now_s)

    def silent(self, now_s: float) -> list[RunInfo]:
        """Return the runs that have sent nothing for too long."""
        return [run.info for run in self.runs.values() if now_s - run.heard_s > self.silent_s]

    def was_held_up(self, seconds: float, now_s: float) -> None:
        """Do not count time in which the pool itself stood still as silence: messages may be waiting to be read."""
        for run in self.runs.values():
            run.heard_s = min(now_s, run.heard_s + seconds)

    def begin_day(self, day: int, now_s: float) -> None:
        """Count what runs pay today from 0, unless it is that day already."""
        if day != self.day:
            self.account(now_s)
            self.day, self.past = day, [replace(past, today_slot_s=0.0) for past in self.past]
            for run in self.runs.values():
                run.today_slot_s = 0.0

    def bid(self, bid: Bid, now_s: float) -> None:
        self.account(now_s)
        run, bid = self.runs[bid.run], self._entitled(bid)
        if run.bid != bid or not run.has_bid:
            run.bid, run.has_bid, self._cleared = bid, True, None

    def _entitled(self, bid: Bid) -> Bid:
        """Return the bid with the share and priority with which the run joined."""
        info = self.runs[bid.run].info
        return replace(bid, share=info.share, weight=info.weight)

    # ---- slots --------------------------------------------------------------------------------------------------

    def ask(self, request: SlotRequest, now_s: float) -> None:
        """Add a request, unless it is known or granted already: a call may be repeated."""
        if request.ids[0] in self.leased:
            return
        run = self.runs[request.run]
        self.requests.setdefault(request.id, request)
        if request.device is not None:
            run.homes.add((request.node, str(request.device)))
        if self._lacks(run, self.held(request.run)) and run.waits_since_s is None:
            run.waits_since_s, self._cleared = now_s, None

    def release(self, ids: Iterable[str], now_s: float, paid_s: Mapping[str, float] | None = None) -> None:
        """Withdraw requests, and end leases. The call may be repeated, because each request has a new id.

        `paid_s`: see `Statement`.
        """
        self.account(now_s)
        for id in ids:
            if (request := self.requests.pop(id, None)) is not None:
                self.runs[request.run].withdrew_s, self.runs[request.run].withdrew = now_s, request
            elif (slot := self.leased.get(id)) is not None:
                self._bill_as_its_ledger(slot, now_s, (paid_s or {}).get(id, math.inf))
                self._free(slot, now_s)
                self._cleared = None

    def put(self, slot: PoolSlot, now_s: float) -> None:
        """Add a free slot that Ray has granted."""
        self.account(now_s)
        slot.since_s = now_s
        self.slots[slot.id] = slot

    def match(self, now_s: float) -> list[PoolSlot]:
        """Grant free slots: first to runs below their target, then to other requests, except for slots kept for runs below target."""
        self.account(now_s)
        wanting, held = self._wanting(now_s), self.held_by_run()
        for name, run in self.runs.items():
            if run.waits_since_s is not None and not (name in wanting and self._lacks(run, held[name])):
                run.waits_since_s = self._cleared = None
        granted: list[PoolSlot] = []
        free = self.free
        if not free or not self.requests:
            return granted
        targets = self.clearing().slots
        pauses = wanting - {request.run for request in self.requests.values()}

        def below(run: str) -> bool:
            return held[run] < targets[run]

        while free:
            pausing, found = sum(max(0, targets[name] - held[name]) for name in pauses), list[PoolSlot]()
            for request in sorted(self.requests.values(), key=lambda request: not below(request.run)):
                if (below(request.run) or len(free) - request.width >= pausing) and (found := self._choose(request, free)):
                    break
            if not found:
                break
            del self.requests[request.id]
            for slot, id in zip(found, request.ids, strict=True):
                self._give(slot, request.run, id, now_s)
                free.remove(slot)
            held[request.run] += request.width
            granted += found
        return granted

    def _choose(self, request: SlotRequest, free: Iterable[PoolSlot]) -> list[PoolSlot]:
        """Return those of the free slots that a request gets: the best ones of one node, or none."""
        by_node: dict[str, list[tuple[tuple[bool | int, ...], int, PoolSlot]]] = {}
        used = {slot.group for slot in self.leased.values()}
        for number, slot in enumerate(free):
            if self.fits(request, slot):
                by_node.setdefault(slot.node, []).append((self._preference(slot, request.run, used), number, slot))
        enough = [sorted(slots)[: request.width] for slots in by_node.values() if len(slots) >= request.width]
        return [slot for *_, slot in min(enough, default=[])]

    def idle(self, now_s: float, idle_s: float = IDLE_S, *, keeps_warm: bool = True) -> list[PoolSlot]:
        """Return the slots that `match` has left and that should go back to Ray: unused for `idle_s`, or on nodes that a run avoids.

        `keeps_warm`: those of devices with parked processes stay longer.
        """
        avoided = {node for run in self.runs.values() for node in run.avoids}
        warm = {place for run in self.runs.values() for place in run.warm} if keeps_warm else set()
        free, particular = self.free, [one for one in self.requests.values() if one.device is not None or one.width > 1]
        sought = {node for node in {slot.node for slot in free} if any(self.may_use(request, node) for request in particular)}
        limits_s = [WARM_IDLE_S if slot.place in warm else max(idle_s, SOUGHT_S) if slot.node in sought else idle_s for slot in free]
        return [one for one, limit_s in zip(free, limits_s, strict=True) if now_s - one.since_s > limit_s or one.node in avoided]

    def drop(self, id: str, now_s: float) -> None:
        """Forget a slot that went back to Ray, or whose node is gone."""
        self.account(now_s)
        if (slot := self.slots.pop(id, None)) is not None:
            self.leased.pop(slot.request, None)
            self._cleared = None

    def set_nodes(self, nodes: dict[str, tuple[int, Mapping[str, str]]], now_s: float) -> list[PoolSlot]:
        """Set the cluster's nodes: id → slots and labels. Returns the slots of nodes that are gone, which are dropped."""
        if nodes != self.nodes:
            self.account(now_s)
            self.nodes, self._cleared = nodes, None
        gone = [slot for slot in self.slots.values() if slot.node not in nodes]
        for slot in gone:
            self.drop(slot.id, now_s)
        return gone

    # ---- targets ------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of slots of the cluster."""
        return max(sum(count for count, _ in self.nodes.values()), len(self.slots))

    @property
    def free(self) -> list[PoolSlot]:
        return [slot for slot in self.slots.values() if not slot.holder]

    def held(self, run: str) -> int:
        return sum(slot.holder == run for slot in self.leased.values())

    def held_by_run(self) -> Counter[str]:
        return Counter(slot.holder for slot in self.leased.values())

    def clearing(self) -> Clearing:
        """Return the targets of all runs.

        If the pool is too small for all, runs take turns. The run that has waited longest comes first, also while it has some of the slots
        that it needs. Of the runs that have started, the one that has held slots longest pauses.
        """
        if self._cleared is None:
            self._cleared = self.cleared([run.bid for run in self.runs.values()])
        return self._cleared

    def cleared(self, bids: list[Bid]) -> Clearing:
        """Return the division of the slots with these bids."""
        held, size, present, left = self.held_by_run(), self.size, [], self.size
        for bid in sorted(bids, key=lambda bid: self._turn(bid.run, held)):
            if bid.slots[0] <= left:
                present.append(bid)
                left -= bid.slots[0]
        entitled = entitled_slots(size, present, held, self.credits)
        cleared = clear(size, present, held, self.credits, HANDOVER_S, entitled)
        absent = {bid.run for bid in bids} - {bid.run for bid in present}
        reasons = {name: f"{name} waits for its turn: the pool of {size} slots is too small for all runs at once" for name in absent}
        return Clearing({**cleared.slots, **dict.fromkeys(absent, 0)}, cleared.price, {**cleared.reasons, **reasons})

    def _turn(self, name: str, held: Mapping[str, int]) -> tuple[int, float, str]:
        run = self.runs.get(name)
        if run is None:
            return 3, 0.0, name
        if run.waits_since_s is not None and self._lacks(run, held.get(name, 0)):
            return 0, run.waits_since_s, name
        if not held.get(name):
            return 3, run.joined_s, name
        return 2 if run.has_bid else 1, -run.held_since_s, name

    @staticmethod
    def _lacks(run: PoolRun, held: int) -> bool:
        """Return whether a run has fewer slots than it can work with. It keeps its turn until it has them."""
        return held < max(1, run.bid.slots[0])

    def what_if(self, bid: Bid) -> Clearing:
        """Return the division with this bid and the current bids of the other runs."""
        return self.cleared([self._entitled(bid) if run.bid.run == bid.run else run.bid for run in self.runs.values()])

    def waiting(self, now_s: float) -> dict[str, int]:
        """Return {run: slots} of the runs below their target that want slots, or wanted some a moment ago."""
        targets, held = self.clearing().slots, self.held_by_run()
        return {name: missing for name in self._wanting(now_s) if (missing := targets[name] - held[name]) > 0}

    def _wanting(self, now_s: float) -> set[str]:
        """Return the runs that want slots, or wanted some a moment ago."""
        recent = {name for name, run in self.runs.items() if now_s - run.withdrew_s <= RECENT_S}
        return recent | {request.run for request in self.requests.values()}

    # ---- helpers ------------------------------------------------------------------------------------------------

    def may_use(self, request: SlotRequest, node: str) -> bool:
        """Return whether slots of a node are of use for a request."""
        labels = self.nodes.get(node, (0, {}))[1]
        if node in self.runs[request.run].avoids or request.node not in ("", node):
            return False
        return has_labels({**labels, NODE_LABEL: node}, request.labels)

    def fits(self, request: SlotRequest, slot: PoolSlot) -> bool:
        return request.device in (None, slot.device) and self.may_use(request, slot.node)

    def _preference(self, slot: PoolSlot, run: str, used: Collection[Hashable]) -> tuple[bool | int, ...]:
        """Return how a run ranks a slot, the best first. `used`: groups of which a run holds slots.

        It leaves other runs the devices of their learners, and prefers those to which parked processes of its own are bound: on any other
        one a process has to start. Then it prefers devices without other runs' processes, then those of used groups, because Ray gets
        only unused ones back, then those that it held last.
        """
        place = slot.place
        others = sum(place in other.warm for name, other in self.runs.items() if name != run)
        return self._is_home(slot, run), place not in self.runs[run].warm, others, slot.group not in used, slot.last != run

    def _is_home(self, slot: PoolSlot, run: str) -> bool:
        """Return whether processes of another run return to this device."""
        return any(slot.place in other.homes for name, other in self.runs.items() if name != run)

    def has_device(self, request: SlotRequest) -> bool:
        """Return whether the device that a request names is in the pool already, so that Ray need not be asked for it."""
        home = request.node, request.device
        return request.device is not None and any((slot.node, slot.device) == home for slot in self.slots.values())

    def _give(self, slot: PoolSlot, run: str, lease: str, now_s: float) -> None:
        self.handovers += slot.last not in ("", run)
        slot.holder, slot.request, slot.since_s, self.leased[lease] = run, lease, now_s, slot
        known = self.runs[run]
        known.withdrew_s = -float("inf")
        held = self.held(run)
        if known.waits_since_s is not None or held == 1:
            known.held_since_s = now_s
        if not self._lacks(known, held):
            known.waits_since_s = None
        self._cleared = None

    def _free(self, slot: PoolSlot, now_s: float) -> None:
        del self.leased[slot.request]
        slot.holder, slot.request, slot.since_s, slot.last = "", "", now_s, slot.holder

    def _bill_as_its_ledger(self, slot: PoolSlot, now_s: float, paid_s: float) -> None:
        """Deduct the time between a slot's end in the run's ledger and the pool's notice of it."""
        run, more_s = self.runs[slot.holder], max(0.0, now_s - slot.since_s - paid_s)
        run.slot_s, run.today_slot_s = run.slot_s - more_s, max(0.0, run.today_slot_s - more_s)
        self.free_slot_s += more_s

    def account(self, now_s: float) -> None:
        """Bill the time since the last change: each slot has one payer, the run that holds it, or the pool."""
        seconds, self._at_s = now_s - self._at_s, now_s
        if seconds <= 0 or not self.slots:
            return
        held = self.held_by_run()
        for name, count in held.items():
            self.runs[name].slot_s += count * seconds
            self.runs[name].today_slot_s += count * seconds
        self.free_slot_s += (len(self.slots) - sum(held.values())) * seconds
        if len(self.runs) > 1:
            entitled = exact_slots(self.size, [run.bid for run in self.runs.values()])
            before = self.credits
            self.credits = before.after(seconds, held, entitled, self.size)
            for name, run in self.runs.items():
                changed = self.credits.of(name) - before.of(name)
                run.lent_slot_s += max(0.0, changed)
                run.borrowed_slot_s += max(0.0, -changed)
                if self.credits.turns(name) != before.turns(name):
                    self._cleared = None
