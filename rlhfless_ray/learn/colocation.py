"""The worker groups of a run: learner, critic and reference. Between their calls they take turns under the same leases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.rank_settings import RankLayout
from rlhfless_ray.learn.resize import Resharding, resize
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import WeightVersion
from rlhfless_ray.weights.remote_folder import StoredFiles

LEARNER_FILES = ("model", "optimizer", "learner.json", "ema", "adapter_")  # beginnings of their names
OF_CRITIC = "critic_"  # prefix of the critic's files in a checkpoint
APART_S = 2.0  # timeout for leases of separate devices for critic and reference


class ColocatedGroups:
    def __init__(self, context: RunContext, learner: WorkerGroup, critic: WorkerGroup | None, reference: WorkerGroup | None) -> None:
        self.context, self.learner, self.critic, self.reference = context, learner, critic, reference
        self.shares_slots = False  # engines work beside the learner: free leases are kept for them
        self.update_slots = 0  # leases that the updates of the step will need at once, besides the learner's

    @property
    def alone(self) -> bool:
        """Whether the learner is the only worker group."""
        return self.critic is None and self.reference is None

    @property
    def learners(self) -> list[WorkerGroup]:
        return [self.learner] if self.critic is None else [self.learner, self.critic]

    @property
    def all(self) -> list[WorkerGroup]:
        return self.learners if self.reference is None else [*self.learners, self.reference]

    def turn(self, worker_group: WorkerGroup) -> None:
        """Give the worker group its leases, first those of the groups that worked before it, and release what is not needed."""
        self.park_others([worker_group])
        if not worker_group.working:
            self.context.broker.staff(worker_group)
        self.release()

    def park_others(self, busy: Collection[WorkerGroup]) -> None:
        """Park the worker groups that hold leases, except for these."""
        for other in self.all:
            if other not in busy and other.working:
                self.context.broker.put(other.park())

    def release(self, keep: int = 0) -> None:
        """Release free leases, except for `keep` and those that the updates of the step will need."""
        broker, later = self.context.broker, self.update_slots + (0 if self.learner.working else self.learner.slots)
        held = sum(len(i.leases) for group in self.all if group.working and group is not self.learner for i in group.by_rank)
        broker.release(keep=len(broker.free) if self.shares_slots else max(keep, later - held))

    def resize(self, layouts: Mapping[str, RankLayout]) -> Resharding | None:
        """Give groups other layouts, by their names, between an update and the next. Returns what this took of the learner, if it did."""
        found = None
        for group in self.all:
            if (layout := layouts.get(group.name, group.layout)) != group.layout:
                self.turn(group)
                done = resize(group, layout)
                found = done if group is self.learner else found
                self.context.broker.put(group.park())
        return found

    @property
    def learner_nodes(self) -> set[str]:
        """The nodes of the learner's ranks, where its weights are published."""
        return {instance.slot.node for instance in self.learner.by_rank}

    @property
    def complete_nodes(self) -> set[str]:
        """Nodes where a learner rank holds all weights as they are published, see `RankWeights.holds_all`."""
        return {instance.slot.node for instance in self.learner.by_rank} if self.learner.weights.holds_all else set()

    @property
    def learner_slots(self) -> int:
        return self.learner.slots

    # ---- models and state -------------------------------------------------------------------------------------

    def wait_for_copy(self, weights: WeightVersion) -> WeightVersion:
        """Return the version once engines cannot lose it, see `GroupWeights.wait_for_copy`. Call between phases: it may need leases."""
        safe = self.learner.weights.wait_for_copy(weights)
        if self.learner.working:
            self.context.broker.put(self.learner.park())
        return safe

    def open_reference(self, files: StoredFiles, loopback: bool) -> None:
        """Load the initial policy into the reference, and park it."""
        if self.reference is not None:
            self._open(self.reference, files, loopback, None)

    def open_critic(self, files: StoredFiles, loopback: bool, checkpoint: StoredFiles | None) -> None:
        """Load the critic from a model folder, or from a checkpoint, and park it."""
        if self.critic is not None:
            self._open(self.critic, files, loopback, checkpoint and _of_critic(checkpoint))

    def _open(self, worker_group: WorkerGroup, files: StoredFiles, loopback: bool, state: StoredFiles | None) -> None:
        withheld = self._lease_apart(worker_group) if self.context.leases.resource == "gpu" else []
        self.turn(worker_group)
        worker_group.build(files, loopback, state)
        self.context.broker.put([*worker_group.park(), *withheld])

    def _lease_apart(self, worker_group: WorkerGroup) -> list[Lease]:
        """Make devices free where no other worker group has its state, if there are enough. Returns the other free leases, withheld.

        Worker groups on one device take turns.
        """
        broker, leases, ranks = self.context.broker, self.context.leases, worker_group.ranks
        taken = {place for other in self.all for instance in other.by_rank for place in instance.slot.places}
        labels, free = worker_group.pool.labels, broker.take()
        apart = [lease for lease in free if not lease.slot.places & taken and worker_group.pool.may_use(lease)]
        lacks = ranks - len(apart)
        if 0 < lacks <= sum(leases.nodes.slots(labels).values()) - len(leases.held):
            apart += leases.collect(leases.ask(lacks, labels=labels), worker_group.pool.kind, APART_S)
        own = {place for instance in self.learner.by_rank for place in instance.slot.places}
        shared = sorted((lease for lease in free if lease not in apart), key=lambda lease: not lease.slot.places & own)
        broker.put(apart if len(apart) >= ranks else [*shared, *apart])  # the learner's first: its pass before the update may not be needed
        return shared if len(apart) >= ranks else []

    def save(self, folder: Path, deadline_s: float | None = None) -> dict[str, str]:
        """Write the state of learner and critic to a folder, and return the files' checksums. The critic's files have a prefix."""
        prefixes = [(group, OF_CRITIC if group is self.critic else "") for group in self.learners]
        pending = [(group, prefix, group.storage.ask_save(folder, prefix)) for group, prefix in prefixes]
        sums: dict[str, str] = {}
        for group, prefix, refs in pending:
            sums |= group.storage.save(folder, deadline_s, prefix, refs)
        return sums

    @property
    def kept_now(self) -> bool:
        """Whether every learning group has a snapshot of its current state, possibly a pending one."""
        return all(worker_group.recovery.has_now for worker_group in self.learners)

    def start_snapshots(self) -> None:
        """Start the snapshots that are due."""
        for worker_group in self.learners:
            worker_group.start_snapshot()

    def saved(self, load: Callable[[], StoredFiles]) -> None:
        """Remember that the current state is on disk, where `load` finds it."""
        self.learner.recovery.saved(lambda: of_learner(load()))
        if self.critic is not None:
            self.critic.recovery.saved(lambda: _of_critic(load()))

    def pools(self) -> list[WorkerPool]:
        return [worker_group.pool for worker_group in self.all]

    def forget(self) -> None:
        """Drop all references after the processes have ended."""
        for worker_group in self.all:
            worker_group.forget()

    def save_policy(self, folder: Path) -> dict[str, str]:
        """Write the policy's weights, adapters merged, to a model folder. Returns the files' checksums."""
        return self._merged(self.learner, folder)

    def save_critic(self, folder: Path) -> dict[str, str]:
        """Write the critic's weights, adapters merged, and its config.json to a folder. Returns the files' checksums."""
        assert self.critic is not None
        (folder / "config.json").write_bytes(self.critic.config())
        return self._merged(self.critic, folder)

    def _merged(self, worker_group: WorkerGroup, folder: Path) -> dict[str, str]:
        self.turn(worker_group)
        sums = worker_group.storage.save_model(folder)
        self.context.broker.put(worker_group.park())
        return sums


def of_learner(stored: StoredFiles) -> StoredFiles:
    """Return the learner's files among a checkpoint's."""
    return StoredFiles(stored.folder, {name: content for name, content in stored.files.items() if name.startswith(LEARNER_FILES)})


def _of_critic(stored: StoredFiles) -> StoredFiles:
    files = {name.removeprefix(OF_CRITIC): content for name, content in stored.files.items() if name.startswith(OF_CRITIC)}
    return StoredFiles(stored.folder, files, OF_CRITIC)
