"""A gang, of learner, critic or reference: its ranks' instances, staffed with leases for their work and parked in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import GONE, Instance, State, raised_at_start, reason_of
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.replicate import copy_to_driver_node
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.gang_scheduling import GangScheduler, homes_of
from rlhfless_ray.learn.pending import Pending
from rlhfless_ray.learn.recovery import LearnerLost, Recovery
from rlhfless_ray.recipe import LearnerConfig, Recipe
from rlhfless_ray.types import WeightVersion
from rlhfless_ray.weights.checksum import combined
from rlhfless_ray.weights.tensor_file import Content, Files

SETTLE_S = 10.0  # for the state that was asked for last, before its node goes
DEATH_S = 15.0  # until a rank's death is known, after others have failed for it


class WorkerGroup:
    """`staff` → `update`, `publish`, `snapshot` → `park`. The optimizer lives in the instances, which stay parked.

    When a rank's process or node is lost, all ranks start anew, wherever there are leases, and go back to where they were: the
    caller only sees that it took longer. Raises RunError when that happens more often than functions.max_replacements allows.
    """

    def __init__(
        self,
        pool: WorkerPool,
        ranks: int,
        section: LearnerConfig,
        broker: SlotBroker,
        name: str = "learner",
        recovery: Recovery | None = None,
    ) -> None:
        """`section`: of the recipe, for what all gangs share: threads, deadline, patience with skipped steps. `broker`: gets
        the leases of lost ranks, and lends those that a gang lacks. `name`: in messages. `recovery`: default one that keeps
        every step's state and says nothing."""
        self.pool, self.ranks, self.broker, self.name = pool, ranks, broker, name
        more_threads = section.max_slots_per_rank if pool.leases.resource == "cpu" else 1
        self.slots = ranks * more_threads
        self.deadline_s = section.deadline_s
        self.max_skipped = section.max_skipped_updates
        self.skipped_in_a_row = 0
        self.by_rank: list[Instance] = []
        self.recovery = Recovery(1) if recovery is None else recovery
        self.files: Callable[[], Any] | None = None  # reference to the policy's files, once the ranks have loaded it
        self.loopback = False
        self.converts = False  # its checkpoints name tensors otherwise than model folders do, see `TrainerRank.converts`
        self.scheduler = GangScheduler(pool, ranks, broker, name)
        self.coming: list[list[Any]] = []  # (weights, what tells of them) of each rank, asked for with the update before

    def assign_leases(self, spare: list[Lease]) -> list[Lease]:
        """Hand leases to the ranks, see `GangScheduler.take`; ranks that were lost are as they were when this returns. The rest of the
        leases."""
        while True:
            if self._ended:
                self._end()
            if self.by_rank and set(homes_of(self.by_rank)) & self.pool.leases.draining():
                self.recovery.settle(SETTLE_S)
                self.handle_loss(LearnerLost(f"the {self.name}'s node is drained"), FailureCause.NODE_DRAINED)
                spare = self._living_leases(spare)
            given, spare = spare, []  # those that are not taken are kept for the next try when ranks turn out to be lost
            try:
                shares, spare = self.scheduler.take(self.by_rank, given, self.slots // self.ranks)
                self._hand(shares)
                self._begin()
            except LearnerLost as lost:
                self.handle_loss(lost)
                spare = self._living_leases(spare)
            else:
                return spare

    def _assign_free_leases(self) -> None:
        """After a loss: hand the run's free leases to the ranks, and put back the rest."""
        self.broker.put(self.assign_leases(self._living_leases([])))

    def _living_leases(self, spare: list[Lease]) -> list[Lease]:
        """These and the broker's free leases, without those of lost or drained nodes."""
        return self.pool.leases.living([*spare, *self.broker.take()])

    def _hand(self, shares: list[list[Lease]]) -> None:
        staffed = [self.pool.assign_leases(share) for share in shares]
        if not self.by_rank:
            self.by_rank = staffed
        elif {id(i) for i in staffed} != {id(i) for i in self.by_rank}:  # ranks keep their state
            raise RunError(f"the {self.name}'s leases fit other processes than those that hold its state")

    def _begin(self) -> None:
        """The ranks have their leases: now they start, come back to where they were lost, or return to their devices."""
        starting = [i for i in self.by_rank if i.state is State.STARTING]
        if starting:
            self._opened()
            if self.files is not None:
                self._come_back()
        elif self.pool.leases.resource == "gpu":
            refs = [instance.actor.unpark.remote() for instance in self.by_rank]
            self._book(self._all(refs, f"the {self.name}'s return to its device"))
        for instance in self.by_rank:
            instance.state = State.READY

    def _opened(self) -> None:
        for instance in self.by_rank:
            told = self._all([instance.opened], f"the {self.name}'s start")[0]
            instance.memory_mb = told["memory_mb"]
            self._spans(instance, told["spans"])

    def park(self) -> list[Lease]:
        return self.pool.park_all()

    @property
    def working(self) -> bool:
        """Whether its ranks hold their leases."""
        return bool(self.pool.working)

    def fits(self, leases: list[Lease]) -> bool:
        """Whether these leases are enough for every rank, or the ranks have theirs."""
        return self.working or (bool(self.by_rank) and not self._ended and len(self.scheduler.own(self.by_rank, leases)[0]) == self.ranks)

    def prewarm(self, slot: Slot) -> None:
        """Start a process ahead of its lease; of several ranks none, for they would have to come in their order."""
        if self.ranks == 1:
            self.pool.prewarm(slot)

    def forget(self) -> None:
        """At the end: what is referred to lies on nodes that are to become idle."""
        self.by_rank, self.files, self.recovery = [], None, Recovery(0)

    # ---- loss -------------------------------------------------------------------------------------------------

    def handle_loss(self, lost: LearnerLost, cause: FailureCause | None = None) -> None:
        """End every rank: what they hold together is whole or lost. The next `staff` starts them anew."""
        cause = cause or lost.cause or self.pool.cause(*self.by_rank)
        self.recovery.restarts += 1
        self.recovery.say(f"{lost}: the {self.name} starts anew from its newest state")
        leases = [lease for instance in self.by_rank for lease in instance.leases]
        slots = [instance.slot for instance in self.by_rank]
        self._end()
        self.broker.put(self.pool.leases.living(leases))
        self.pool.faults.count(f"a {self.name} process", cause, f"{lost}; continue from the last checkpoint with --resume")
        if not cause.is_preemption:
            self.prewarm(slots[0])

    @property
    def _ended(self) -> bool:
        """Whether processes were ended, for the memory that they held without work, which only those are that hold no state."""
        return any(instance.state is State.GONE for instance in self.by_rank)

    def _end(self) -> None:
        for instance in self.by_rank:
            self.pool.end(instance)
        self.by_rank, self.coming = [], []

    def _come_back(self) -> None:
        """New processes get the newest state, and again what the lost ones were given since."""
        began_s = time.monotonic()
        for instance in list(self.pool.parked):  # started ahead elsewhere than there was a lease
            self.pool.end(instance)
        self._join(self.recovery.newest())
        for what, batch in self.recovery.since:
            replies = self._all(self.ask(what, batch), f"the {self.name}'s lost work")
            self._book(reply[1] if what == "update" else reply for reply in replies)
            self.recovery.redone += what == "update"
        self.recovery.seconds += time.monotonic() - began_s

    def _surely(self, ask: Callable[[], list[Any]], what: str) -> list[Any]:
        """What the ranks reply, asked again of new ones when one was lost."""
        return self._begun(ask, what).result()

    def _begun(self, ask: Callable[[], list[Any]], what: str) -> Pending[list[Any]]:
        """The same, but the ranks are waited for only when its result is."""
        asked = [ask()]

        def result() -> list[Any]:
            while True:
                try:
                    return self._all(asked.pop() if asked else ask(), what)
                except LearnerLost as lost:
                    self.handle_loss(lost)
                    self._assign_free_leases()

        return Pending(result)

    # ---- work -------------------------------------------------------------------------------------------------

    def warm_start(self, files: Any, recipe: Recipe) -> Files:
        first = self.by_rank[0]
        ref = first.actor.warm_start.remote(files, recipe, len(first.leases))
        content, spans = get(ref, self.deadline_s, "the supervised warm start")
        self._spans(first, spans)
        return content

    def build(self, files: Callable[[], Any], loopback: bool, state: Any) -> None:
        """Load the model (or a checkpoint's state) into every rank and join them. `files`: makes a reference to the model's."""
        self.files, self.loopback, self.recovery.whole = files, loopback, state
        try:
            self._join(state)
        except LearnerLost as lost:
            self.handle_loss(lost)
            self._assign_free_leases()

    def _join(self, state: Any) -> None:
        assert self.files is not None
        place = self._all([self.by_rank[0].actor.rendezvous.remote(self.loopback)], f"the {self.name} gang's address")[0]
        files = self.files()
        refs = [i.actor.build.remote(files, place, len(i.leases), state) for i in self.by_rank]
        told = self._all(refs, f"the {self.name} to load its model")
        self._book(one["spans"] for one in told)
        for instance, one in zip(self.by_rank, told, strict=True):
            instance.memory_mb = one["memory_mb"]
        self.converts = bool(told[0].get("converts"))

    def update(self, batch: Batch) -> Any:
        """One update on every rank; all of them report the same UpdateStats, or CriticStats. Raises RunError after too many skipped
        in a row."""
        return self.start_update(batch).result()

    def start_update(self, batch: Batch, *, publishes: bool = False) -> Pending[Any]:
        """Start `update`. `publishes`: `publish` comes next, so the ranks go on to that at once."""

        def ask() -> list[Any]:
            refs = self.ask("update", batch)
            self.coming = self._weights() if publishes else []
            return refs

        begun = self._begun(ask, f"the {self.name}'s update")
        return Pending(lambda: self._updated(batch, begun.result()))

    def _updated(self, batch: Batch, replies: list[Any]) -> Any:
        self.recovery.did("update", batch)
        self._book(spans for _, spans in replies)
        stats = replies[0][0]
        self.skipped_in_a_row = (0 if stats.applied else self.skipped_in_a_row) + stats.skipped_last
        if self.skipped_in_a_row > self.max_skipped:
            advice = "look at samples/" if "no sample" in stats.reason else f"lower {self.name}.learning_rate"
            raise RunError(
                f"{self.skipped_in_a_row} optimizer steps in a row were skipped (learner.max_skipped_updates = "
                f"{self.max_skipped}): {stats.reason}; {advice}"
            )
        return stats

    def model(self) -> Content:
        """Whole weights as a safetensors file, adapters merged. The ranks hold their leases."""
        replies = self._surely(lambda: [i.actor.model.remote() for i in self.by_rank], f"the {self.name}'s weights")
        self._book(spans for _, spans in replies)
        return replies[0][0]

    def saved(self, content: Content) -> Content:
        """A checkpoint's safetensors file as a model folder has it. Works without leases, as `snapshot`."""
        if not self.converts:
            return content
        if not self.by_rank:
            self.pool.leases.release(self.assign_leases([]))
            self.pool.leases.release(self.park())
        return self._surely(lambda: [self.by_rank[0].actor.saved.remote(content)], f"the {self.name}'s model file")[0]

    def config(self) -> bytes:
        """config.json of a critic's model."""
        return self._surely(lambda: [self.by_rank[0].actor.config.remote()], "the critic's config")[0]

    def passed(self, what: str, batch: Batch, *more: Any) -> dict[str, np.ndarray]:
        """Per response token, under the current weights, by name: `logprobs` of a learner (`more`: the names, see
        `overlap.passes`), `reference` of a reference, `values` of a critic. Each rank says it of its share, and 0 of the others."""
        replies = self._surely(lambda: self.ask(what, batch, *more), f"the {self.name}'s {what}")
        self._book(spans for _, spans in replies)
        return _together(replies)

    def ask(self, what: str, batch: Batch, *more: Any) -> list[Any]:
        """Call `what` of every rank, which says it of the batch; references, such as `answered` takes."""
        shared = ray.put(batch)
        return [getattr(i.actor, what).remote(shared, len(i.leases), *more) for i in self.by_rank]

    def accumulate(self, batch: Batch) -> list[Any]:
        """Gradients of a part of a step, on every rank; references for `accumulated`."""
        self.recovery.did("accumulate", batch)
        return self.ask("accumulate", batch)

    def pending(self, refs: list[Any]) -> list[Any]:
        """Those that are not there yet."""
        return ray.wait(refs, num_returns=len(refs), timeout=0)[1] if refs else []

    def accumulated(self, refs: list[Any]) -> None:
        """Wait for them. The ranks still hold the leases that they work under. When one of them was lost, nobody waits for its
        successor: it accumulates them again when it is staffed next."""
        if replies := self._heard(refs, "gradients"):
            self._book(replies)

    def answered(self, refs: list[Any], what: str) -> tuple[dict[str, np.ndarray], float] | None:
        """The same of what was asked for by `ask`, and the seconds that the slowest rank took; None when a rank was lost: whoever
        needs it asks again."""
        if not (replies := self._heard(refs, what)):
            return None
        self._book(spans for _, spans in replies)
        return _together(replies), max(sum(span.to_s - span.from_s for span in spans) for _, spans in replies)

    def _heard(self, refs: list[Any], what: str) -> list[Any]:
        """The replies, none when a rank was lost."""
        try:
            return self._all(refs, f"the {self.name}'s {what}")
        except LearnerLost as lost:
            self.handle_loss(lost)
            return []

    def publish(self, version: int) -> WeightVersion:
        """The current weights as a version that engines can pull. The arrays stay in the object store of the first rank's node;
        where that is not the driver's, a copy is made there that nobody waits for."""
        weights: list[Any] = []

        def ask() -> list[Any]:
            refs, self.coming = self.coming or self._weights(), []
            weights[:] = [refs[0][0]]
            return [told for _, told in refs]

        replies = self._surely(ask, "the learner to publish weights")
        self._book(spans for _, spans in replies)
        node = self.by_rank[0].slot.node
        copy, there = copy_to_driver_node(weights[0], node)
        told = replies[0][0]  # a digest of each tensor; of a replayed learner one number
        known = isinstance(told, dict)
        total, digests = (combined(told), ray.put(told)) if known else (told, None)
        return WeightVersion(version, weights[0], total, node if there else "", copy if there else None, digests)

    def _weights(self) -> list[list[Any]]:
        return [i.actor.weights.options(num_returns=2).remote() for i in self.by_rank]

    def safe(self, weights: WeightVersion) -> WeightVersion:
        """Return the version once its copy is on the driver's node, so that a lost node cannot take it from engines.

        If the node is lost already, the copy takes the place of the original. If it was lost before the copy was complete, the
        weights are published again, which may need leases. Raises RunError if they differ from the first ones.
        """
        while weights.copy is not None:
            try:
                get(weights.copy, self.deadline_s, "the driver's copy of the weights")
            except (ray.exceptions.RayTaskError, *GONE):
                self.recovery.say(f"weight version {weights.version} was lost before it was copied: the {self.name} publishes it again")
                again = self.publish(weights.version)
                if again.checksum != weights.checksum:
                    raise RunError(f"the {self.name} published other weights as version {weights.version} the second time") from None
                weights = again
            else:
                if not self.pool.leases.lose(weights.node):
                    return weights
                self.recovery.say(f"weight version {weights.version} was lost with its node: engines load the copy")
                weights = replace(weights, ref=weights.copy, copy=None)
        return weights

    def keep(self) -> None:
        """Have the state of now kept outside of the ranks, if it is time to. Nobody waits; it needs no lease."""
        if self.recovery.is_due and self.by_rank:
            replies = [i.actor.keep.options(num_returns=2).remote() for i in self.by_rank]
            self.recovery.take(replies, self.by_rank[0].slot.node)

    def ask_snapshot(self) -> list[Any]:
        """References for `snapshot`; none where the state is kept already."""
        return [] if self.recovery.has_now else self._snapshots()

    def _snapshots(self) -> list[Any]:
        return [i.actor.snapshot.remote() for i in self.by_rank]

    def snapshot(self, deadline_s: float | None = None, asked: list[Any] | None = None) -> Files:
        """Model, optimizer and random state as files. Works without leases too: it reads memory, on the host."""
        if (kept := self.recovery.current(deadline_s or self.deadline_s)) is not None:
            with suppress(*GONE):  # lost where it lay: the ranks have it still
                return get(kept, deadline_s or self.deadline_s, f"the {self.name}'s snapshot")
        working = self.working
        while True:
            try:
                if not self.by_rank:
                    self._assign_free_leases()
                refs, asked = asked or self._snapshots(), None
                found = self._all(refs, f"the {self.name}'s snapshot", deadline_s)[0]
            except LearnerLost as lost:
                self.handle_loss(lost)
            else:
                if not working:
                    self.broker.put(self.park())
                return found

    def _all(self, refs: list[Any], what: str, deadline_s: float | None = None) -> list[Any]:
        try:
            return get(refs, deadline_s or self.deadline_s, what)
        except ray.exceptions.RayTaskError as error:
            if "EADDRINUSE" in f"{error.cause} {error}":  # since it was chosen; other ranks wait there and cannot be asked again
                taken = f"{what} failed: the port that its processes were to meet at was taken meanwhile"
                raise LearnerLost(taken, FailureCause.DIED) from error
            if self.ranks > 1 and (death := _death(refs)) is not None:  # the others fail for it, and may do so first
                raise LearnerLost(f"{what} failed: a {self.name} process died: {reason_of(death)}") from death
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise RunError(f"{what} failed: {reason_of(error)}") from error
        except GONE as error:
            if raised_at_start(error):
                raise RunError(f"{what} failed: {reason_of(error)}") from error
            raise LearnerLost(f"{what} failed: a {self.name} process died: {reason_of(error)}") from error

    def _book(self, spans: Iterable[list[Any]]) -> None:
        """What every rank did, in the order of the ranks, to the ledger."""
        for instance, own in zip(self.by_rank, spans, strict=True):
            self._spans(instance, own)

    def _spans(self, instance: Instance, spans: list[Any]) -> None:
        self.pool.ledger.spans([lease.id for lease in instance.leases], spans)


def _together(replies: list[Any]) -> dict[str, np.ndarray]:
    """What all ranks said, each of its share."""
    return {name: sum((said[name] for said, _ in replies[1:]), first) for name, first in replies[0][0].items()}


def _death(refs: list[Any]) -> BaseException | None:
    """What one of these calls says of the death of its process, if that is heard of within a few seconds."""
    end = time.monotonic() + DEATH_S
    for ref in refs:
        try:
            ray.get(ref, timeout=max(0.0, end - time.monotonic()))
        except GONE as error:
            return error
        except (ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError):
            continue
    return None
