"""Recover a lost learner: the newest complete snapshot outside of its processes, and the batches since.

Snapshots are taken while the processes are idle and are kept on the driver's node. A worker group that lost a rank restarts from the
newest one and gets the same batches again, in the same parts. It makes the same updates: none is applied twice, and none is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import is_loss, reason_of
from rlhfless_ray.functions.replicate import copy_to_driver_node
from rlhfless_ray.weights.remote_folder import FilesInStore, StoredFiles

Snapshot = StoredFiles | list[FilesInStore] | None  # on disk, or the files of every rank


def stored(files: list[tuple[Any, Any]], costs: list[Any]) -> list[FilesInStore]:
    """Return what ranks have put into the object store. `files`, `costs`: the replies to `RankActor.keep`, of each rank."""
    of_ranks = zip(files, costs, strict=True)
    return [FilesInStore(whole, {name: (x, parts) for name, x in headers.items()}) for (whole, parts), (*_, headers) in of_ranks]


class LearnerLost(RunError):
    """A rank's process died, and with it the state that the ranks hold together. `cause`: None if it is not known yet."""

    def __init__(self, what: str, cause: FailureCause | None = None) -> None:
        super().__init__(what)
        self.cause = cause


class Recovery:
    def __init__(self, every_steps: int, say: Callable[[str], None] = lambda _: None, *, on_disk: bool = True) -> None:
        """Configure recovery from lost processes.

        `every_steps`: updates between two in-memory snapshots; 0: only checkpoints on disk. `say`: callback for log messages. `on_disk`:
        whether there are such checkpoints. If both are off, keep no batches: all would have to be kept.
        """
        self.every_steps, self.say, self.keeps_batches = every_steps, say, every_steps > 0 or on_disk
        self.is_final = False  # the ranks have worked on a batch that was not kept: a lost learner cannot be restored
        self.complete: Snapshot = None  # the newest complete snapshot; None: the policy's files are the state
        self.load: Callable[[], StoredFiles] | None = None  # finds the snapshot if it is on disk
        self.since: list[Any] = []  # of the updates after the snapshot
        self.pending: tuple[int, list[Any], list[Any]] | None = None  # pending snapshot: updates before it, what to wait for, its state
        self.restarts = self.redone = 0
        self.seconds = 0.0  # spent on restoring lost learners
        self.reported: tuple[float, ...] = 0, 0, 0.0  # the three values above at the last metrics
        self.snapshot_s, self.snapshot_bytes = 0.0, 0  # processor time of the first rank for the newest snapshot, and its size

    @property
    def updates(self) -> int:
        """Number of updates since the newest snapshot, pending ones included."""
        return len(self.since) - (self.pending[0] if self.pending else 0)

    def record(self, batch: Any) -> None:
        """Remember that the ranks finished an update with this batch, or other work that they would be given again."""
        if self.keeps_batches:
            self.since.append(batch)
        else:
            self.is_final = True

    @property
    def is_due(self) -> bool:
        return 0 < self.every_steps <= self.updates

    @property
    def has_now(self) -> bool:
        """Whether there is a snapshot of the current state, possibly a pending one."""
        return not self.updates and not self.is_final and (self.pending is not None or self.complete is not None)

    def take(self, replies: list[list[Any]], nodes: list[str]) -> None:
        """Begin to keep a snapshot. `replies`: see `RankActor.keep`, of each rank. `nodes`: the ranks' nodes, which hold the files."""
        self.settle(5.0)
        copies = [[copy_to_driver_node(ref, node) for ref in files] for (*files, _), node in zip(replies, nodes, strict=True)]
        waits = [cost for *_, cost in replies] + [done for of_rank in copies for _, there in of_rank for done in there]
        self.pending = len(self.since), waits, [tuple(copy for copy, _ in of_rank) for of_rank in copies]

    def settle(self, seconds: float = 0.0) -> None:
        """Make the pending snapshot the newest one if it is complete. Waits at most this many seconds for it."""
        if self.pending is None:
            return
        updates, refs, state = self.pending
        if len(ray.wait(refs, num_returns=len(refs), timeout=seconds, fetch_local=False)[0]) < len(refs):
            return
        self.pending = None
        try:
            costs = ray.get(refs)[: len(state)]
            self.snapshot_s, self.snapshot_bytes = max(seconds for seconds, *_ in costs), sum(size for _, size, _ in costs)
        except RayError as error:  # the previous snapshot stays
            if not is_loss(error):  # a lost rank shows in its next call
                self.say(f"a snapshot of the learner's state failed: {reason_of(error)}")
            return
        self.complete = stored(state, costs)
        del self.since[:updates]

    def saved(self, load: Callable[[], StoredFiles]) -> None:
        """Restart from a checkpoint of the current state, which `load` finds, unless snapshots are kept in memory."""
        if not self.every_steps:
            self.complete, self.load, self.since = None, load, []

    def newest(self) -> Snapshot:
        """Return the newest complete snapshot, or None if training has not changed the initial weights."""
        self.settle(10.0)
        return self.load() if self.load is not None else self.complete

    def current(self, seconds: float) -> list[FilesInStore] | None:
        """Return a snapshot of the current state in memory, or None. Waits this many seconds at most for a pending one."""
        self.settle(seconds)
        return None if self.pending or self.updates or not isinstance(self.complete, list) else self.complete

    def take_metrics(self) -> dict[str, Any]:
        """Return metrics of the recoveries since the last call, and the cost of the newest snapshot."""
        now = self.restarts, self.redone, self.seconds
        restarts, redone, seconds = (new - old for new, old in zip(now, self.reported, strict=True))
        self.reported = now
        return {
            "faults/learner_restarts": restarts,
            "faults/updates_redone": redone,
            "faults/learner_recovery_s": seconds,
            "checkpoint/memory_s": self.snapshot_s,
            "checkpoint/memory_mb": self.snapshot_bytes / 2**20,
        }
