"""The worker group of learner, critic or reference: one instance per rank, with leases while it works and parked in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import Instance, State, reason_of
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.gang_scheduling import GangScheduler, homes_of
from rlhfless_ray.learn.group_files import GroupFiles
from rlhfless_ray.learn.group_weights import GroupWeights
from rlhfless_ray.learn.rank_calls import RankCalls, slowest_s
from rlhfless_ray.learn.rank_settings import RankLayout, RankSettings, ReferenceSettings
from rlhfless_ray.learn.recovery import LearnerLost, Recovery, Snapshot, stored
from rlhfless_ray.learn.shares import Cutter
from rlhfless_ray.recipe import LearnerConfig, Recipe
from rlhfless_ray.weights.remote_folder import FilesInStore, StoredFiles
from rlhfless_ray.weights.tensor_file import Files

SETTLE_S = 10.0  # time for a pending snapshot before its node is drained


class WorkerGroup(RankCalls):
    """One instance per rank. Call `assign_leases`, then `start_update`, `publish` or `save`, then `park`.

    The instances keep the optimizer state while they are parked.

    If the process or node of a rank is lost, all ranks restart wherever there are leases and return to their previous state. For the
    caller the call only takes longer. Raises RunError if this happens more often than functions.max_replacements allows.
    """

    def __init__(
        self,
        pool: WorkerPool,
        settings: RankSettings | ReferenceSettings,
        section: LearnerConfig,
        broker: SlotBroker,
        name: str = "learner",
        recovery: Recovery | None = None,
        shares_base: bool = False,
        exact: bool = False,
    ) -> None:
        """Create a worker group without processes.

        Args:
            settings: of its ranks, as they are at first; `resize` changes their layout.
            section: settings that all worker groups share: threads, deadline, number of skipped updates.
            broker: gets the leases of lost ranks and lends missing ones.
            name: the group's name in messages.
            recovery: default: a snapshot in every step, and no messages.
            shares_base: published versions are adapters that refer to the files of their base.
            exact: a rank always runs as many threads as it may hold leases, see `run.exact`.
        """
        self.pool, self.settings, self.broker, self.name = pool, settings, broker, name
        self.max_threads = section.max_slots_per_rank if pool.leases.resource == "cpu" else 1
        self.threads = self.max_threads if exact else None  # of every rank in every call; None: as many as it holds leases
        self.deadline_s = section.deadline_s
        self.max_skipped = section.max_skipped_updates
        self.skipped_in_a_row = 0
        self.by_rank: list[Instance] = []
        self.recovery = Recovery(1) if recovery is None else recovery
        self.files: StoredFiles | None = None  # of the model, once the ranks have loaded it
        self.loopback = False
        self.notes: list[str] = []  # for the user, about the ranks' processors
        self.cutter = Cutter()  # replaced by the ranks' own once they have loaded the model
        self.scheduler = GangScheduler(pool, broker, name)
        self.set_layout(settings.layout)
        self.find_smaller: Callable[[], RankLayout | None] = lambda: None  # a layout for which there are slots, if this has none
        self.call_s = 0.0  # seconds of the slowest rank's work in the newest update or `start_compute`
        self.weights = GroupWeights(self, shares_base)
        self.storage = GroupFiles(self)

    def set_layout(self, layout: RankLayout) -> None:
        """Use this layout for the ranks that start, or are built, from now on."""
        self.layout = layout
        self.scheduler.ranks, self.slots = layout.ranks, layout.ranks * self.max_threads

    def assign_leases(self, spare: list[Lease]) -> list[Lease]:
        """Assign leases to the ranks, see `GangScheduler.take`, and restore lost ranks. Returns the leases that are left."""
        while True:
            if self._were_ended:
                self._end_ranks()
            if self.by_rank and set(homes_of(self.by_rank)) & self.pool.leases.nodes.draining():
                self.recovery.settle(SETTLE_S)
                self.handle_loss(LearnerLost(f"the {self.name}'s node is drained"), FailureCause.NODE_DRAINED)
                spare = self._living_leases(spare)
            given, spare = spare, []  # leases that are not taken stay in `spare` for the next attempt if ranks turn out to be lost
            try:
                shares, spare = self.scheduler.take(self.by_rank, given, self.slots // self.ranks)
                self._assign_shares(shares)
                self._start_ranks()
            except LearnerLost as lost:
                self.handle_loss(lost)
                spare = self._living_leases(spare)
            except RunError as error:
                if self.by_rank or (layout := self.find_smaller()) is None:
                    raise
                self.recovery.say(f"{error}; it continues on {layout}")
                self.set_layout(layout)
            else:
                return spare

    def assign_free_leases(self) -> None:
        """After a loss: assign the run's free leases to the ranks, and put back the rest."""
        self.broker.put(self.assign_leases(self._living_leases([])))

    def _living_leases(self, spare: list[Lease]) -> list[Lease]:
        """Return these and the broker's free leases, without those of lost or drained nodes."""
        return self.pool.leases.without_lost([*spare, *self.broker.take()])

    def _assign_shares(self, shares: list[list[Lease]]) -> None:
        staffed = [self.pool.assign_leases(share) for share in shares]
        if not self.by_rank:
            self.by_rank = staffed
        elif {id(i) for i in staffed} != {id(i) for i in self.by_rank}:  # ranks keep their state
            raise RunError(f"the {self.name}'s leases fit other processes than those that hold its state")

    def _start_ranks(self) -> None:
        """Start the ranks, which hold their leases: restore lost ranks, or return parked ones to their devices."""
        starting = [i for i in self.by_rank if i.state is State.STARTING]
        if starting:
            for instance in self.by_rank:
                self.wait_until_open(instance)
            if self.files is not None:
                self._restore()
        elif self.pool.leases.resource == "gpu":
            refs = [instance.actor.unpark.remote() for instance in self.by_rank]
            self.record_spans(self.wait_for(refs, f"the {self.name}'s return to its device"))
        for instance in self.by_rank:
            instance.state = State.READY

    def wait_until_open(self, instance: Instance) -> None:
        """Wait until a process has started, and record its start."""
        reply = self.wait_for([instance.opened], f"the {self.name}'s start")[0]
        instance.memory_mb = reply["memory_mb"]
        self.record_spans_of(instance, reply["spans"])

    def park(self) -> list[Lease]:
        return self.pool.park_all()

    @property
    def working(self) -> bool:
        """Whether the ranks hold their leases."""
        return bool(self.pool.working)

    def fits(self, leases: list[Lease]) -> bool:
        """Return whether these leases are enough for every rank, or the ranks have leases already."""
        if self.working:
            return True
        return bool(self.by_rank) and not self._were_ended and not self.scheduler.fit(self.by_rank, leases)[2]

    def prewarm(self, slot: Slot) -> None:
        """Start a process ahead of its lease, unless there are several ranks, whose slots are not known yet."""
        if self.ranks == 1:
            self.pool.prewarm(slot)

    def forget(self) -> None:
        """Drop all references at the end, so that the nodes that hold the objects become idle."""
        self.by_rank, self.files, self.recovery = [], None, Recovery(0)

    # ---- loss -------------------------------------------------------------------------------------------------

    def handle_loss(self, lost: LearnerLost, cause: FailureCause | None = None) -> None:
        """End every rank, because they hold their state together. The next `assign_leases` restarts them."""
        if self.recovery.is_final:
            raise RunError(
                f"{lost}; there is no copy of the {self.name}'s state: set checkpoint.memory_every_steps to at least 1, or "
                "checkpoint.resumable to true"
            )
        cause = cause or lost.cause or self.pool.cause(*self.by_rank)
        self.recovery.restarts += 1
        self.recovery.say(f"{lost}: the {self.name} restarts from its newest snapshot")
        leases = [lease for instance in self.by_rank for lease in instance.leases]
        slots = [instance.slot for instance in self.by_rank]
        self._end_ranks()
        self.broker.put(self.pool.leases.without_lost(leases))
        self.pool.faults.count(f"a {self.name} process", cause, f"{lost}; continue from the last checkpoint with --resume")
        if not cause.is_preemption:
            self.prewarm(slots[0])

    @property
    def _were_ended(self) -> bool:
        """Return whether idle processes were ended to free memory. This happens only to processes without state."""
        return any(instance.state is State.GONE for instance in self.by_rank)

    def _end_ranks(self) -> None:
        for instance in self.by_rank:
            self.pool.end(instance)
        self.by_rank = []
        self.weights.forget_calls()

    def _restore(self) -> None:
        """Give new processes the newest snapshot, and the batches that the lost ones got since."""
        began_s = time.monotonic()
        for instance in list(self.pool.parked):  # prewarmed on other slots than the leased ones
            self.pool.end(instance)
        self.load_model(self.recovery.newest())
        for batch in self.recovery.since:
            replies = self.wait_for(self.ask("update", batch), f"the {self.name}'s lost work")
            self.record_spans(spans for _, spans in replies)
            self._count(replies[0][0])
            self.recovery.redone += 1
        self.recovery.seconds += time.monotonic() - began_s

    def call(self, ask: Callable[[], list[Any]], what: str) -> list[Any]:
        """Return the ranks' replies. If a rank is lost, restart all ranks and repeat the calls."""
        return self._start_call(ask, what).result()

    def _start_call(self, ask: Callable[[], list[Any]], what: str) -> Pending[list[Any]]:
        """Start the calls. `result` waits for the replies like `call`."""
        refs = ask()
        pending = [refs]

        def result() -> list[Any]:
            while True:
                try:
                    return self.wait_for(pending.pop() if pending else ask(), what)
                except LearnerLost as lost:
                    self.handle_loss(lost)
                    self.assign_free_leases()

        return Pending(result, lambda: not self.pending(refs) or self.have_failed(refs), lambda: self.have_failed(refs), tuple(refs))

    # ---- work -------------------------------------------------------------------------------------------------

    def warm_start(self, files: object, recipe: Recipe) -> Files:
        first = self.by_rank[0]
        ref = first.actor.warm_start.remote(files, recipe, self.threads_of(first))
        try:
            content, spans = get(ref, self.deadline_s, "the supervised warm start")
        except RayActorError as error:
            raise RunError(f"the process of the supervised warm start was lost ({reason_of(error)}); start the run again") from error
        self.record_spans_of(first, spans)
        return content

    def build(self, files: StoredFiles, loopback: bool, state: StoredFiles | None) -> None:
        """Load the model, and a checkpoint's `state`, into every rank and connect the ranks. `files`: the model folder's."""
        self.files, self.loopback, self.recovery.complete = files, loopback, state
        try:
            self.load_model(state)
        except LearnerLost as lost:
            self.handle_loss(lost)
            self.assign_free_leases()

    def load_model(self, state: Snapshot) -> list[dict[str, Any]]:
        """Build every rank from a state, and connect them. Returns their replies, see `RankActor.build`."""
        assert self.files is not None
        place = self.wait_for([self.by_rank[0].actor.rendezvous.remote(self.loopback)], f"the {self.name} worker group's address")[0]
        # ranks of ZeRO 3 need a part of every tensor; engines read the base of adapters, which is whole
        divides = self.layout.zero_stage == 3 and self.name != "reference" and not self.weights.shares_base
        files, source = self.storage.sources(self.files, state, divides=divides)
        self.weights.share_base(self.files, files)
        settings = [self.settings.placed(rank, self.layout) for rank in range(self.ranks)]
        refs = [i.actor.build.remote(files, place, self.threads_of(i), source, own) for i, own in zip(self.by_rank, settings, strict=True)]
        opened = self.wait_for(refs, f"the {self.name} to load its model")
        self.record_spans(one["spans"] for one in opened)
        self.cutter = opened[0]["cutter"]
        self.weights.opened(opened[0])
        if self.cutter.sharing is not None and (obstacle := self.cutter.sharing.obstacle):
            self.recovery.say(f"the {self.name} computes a copy of the prompt for each response: {obstacle}")
        for instance, one in zip(self.by_rank, opened, strict=True):
            instance.memory_mb = one["memory_mb"]
        self.notes = [one["note"] for one in opened if one.get("note")]
        return opened

    def start_update(self, batch: Batch, *, publishes: bool = False) -> Pending[Any]:
        """Start an update on every rank. The result: UpdateStats or CriticStats, which are the same on all ranks.

        It raises RunError after too many skipped updates in a row. `publishes`: `publish` follows, so ranks prepare the weights at once.
        """

        def ask() -> list[Any]:
            refs = self.ask("update", batch)
            self.weights.request(publishes)
            return refs

        begun = self._start_call(ask, f"the {self.name}'s update")
        return replace(begun, result=lambda: self._updated(batch, begun.result()))

    def _updated(self, batch: Batch, replies: list[Any]) -> Any:
        self.recovery.record(batch)
        self.weights.wait_until_read()  # it ended before the update began
        self.record_spans(spans for _, spans in replies)
        self.call_s = slowest_s(spans for _, spans in replies)
        stats = replies[0][0]
        self._count(stats)
        self.skipped_in_a_row = (0 if stats.applied else self.skipped_in_a_row) + stats.skipped_last
        if self.skipped_in_a_row > self.max_skipped:
            advice = "look at samples/" if "no sample" in stats.reason else f"lower {self.name}.learning_rate"
            raise RunError(
                f"{self.skipped_in_a_row} optimizer steps in a row were skipped (learner.max_skipped_updates = "
                f"{self.max_skipped}): {stats.reason}; {advice}"
            )
        return stats

    def _count(self, stats: Any) -> None:
        self.cutter = replace(self.cutter, optimizer_steps=self.cutter.optimizer_steps + stats.applied)

    def config(self) -> bytes:
        """Return config.json of a critic's model."""
        return self.call(lambda: [self.by_rank[0].actor.config.remote()], "the critic's config")[0]

    def compute(self, what: str, batch: Batch, *more: object) -> dict[str, np.ndarray]:
        """Return the result of `start_compute`."""
        return self.start_compute(what, batch, *more).result()

    def start_compute(self, what: str, batch: Batch, *more: object) -> Pending[dict[str, np.ndarray]]:
        """Start to compute values per response token under the current weights, by name.

        `what`: `logprobs` of a learner (`more`: the names, see `overlap_rules.passes`), `reference` of a reference, or `values` of a
        critic.
        """
        begun = self._start_call(lambda: self.ask(what, batch, *more), f"the {self.name}'s {what}")
        return Pending(lambda: self._computed(begun.result()), begun.is_ready, begun.has_failed, begun.refs)

    def _computed(self, replies: list[Any]) -> dict[str, np.ndarray]:
        self.record_spans(spans for *_, spans in replies)
        self.call_s = slowest_s(spans for *_, spans in replies)
        return self.joined(replies)

    def wait_for_values(self, refs: list[Any], what: str) -> tuple[dict[str, np.ndarray], float] | None:
        """Wait for replies to `ask`. Returns them with the slowest rank's seconds, or None if a rank was lost: then call `ask` again."""
        try:
            replies = self.wait_for(refs, f"the {self.name}'s {what}")
        except LearnerLost as lost:
            self.handle_loss(lost)
            return None
        self.record_spans(spans for *_, spans in replies)
        return self.joined(replies), slowest_s(spans for *_, spans in replies)

    def start_snapshot(self) -> None:
        """Start a snapshot of the current state if one is due. Does not wait, and needs no lease."""
        if self.recovery.is_due and self.by_rank:
            self._begin_snapshot()

    def _begin_snapshot(self) -> list[Any]:
        replies = [i.actor.keep.options(num_returns=3).remote() for i in self.by_rank]
        if self.recovery.every_steps:
            self.recovery.take(replies, homes_of(self.by_rank))
        return replies

    def snapshot(self) -> list[FilesInStore]:
        """Return the current state, as files in the object stores of the ranks' nodes."""
        replies: list[Any] = []

        def ask() -> list[Any]:
            replies[:] = self._begin_snapshot()
            return [cost for *_, cost in replies]

        costs = self.call(ask, f"the {self.name}'s state")
        return stored([tuple(files) for *files, _ in replies], costs)
