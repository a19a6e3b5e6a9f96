"""The driver's side of a drafter that is trained during the run, on slots that are idle in the tail of a rollout.

Its failures do not end the run: engines keep the weights they have, and a new process continues from the newest weights.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.instance import Instance, lost_on_the_way, reason_of
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.drafter_trainer import KEPT_TOKENS, DrafterStats, SampledSequence
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Sample
from rlhfless_ray.weights.tensor_file import Files, as_numpy, as_tensor, load_tensors, read_metadata, save_tensors

FILE = "drafter.safetensors"  # in a checkpoint
MOMENTS = "moments/"  # before the names of the optimizer's moments in it
PASSES = 4  # number of times that updates read each sampled token
CALL_S = 1.0  # longest call, after which the slot is offered to the learner again
FIRST_UPDATE_S = 0.1  # assumed seconds of an update before the first measurement
STOP_S = 10.0  # timeout for the running update at the end of a rollout
MAX_FAILURES = 3  # failures in a row after which the drafter is no longer trained
FETCH_S = 30.0  # timeout for the weights of a checkpoint


class TrainedDrafter:
    def __init__(self, context: RunContext, pool: WorkerPool) -> None:
        self.context, self.pool = context, pool
        self.version = 0
        self.weights: Any = None  # reference to {name: array} of that version; None: the initial files
        self.moments: Any = None  # reference to the optimizer's moments in the checkpoint that the run continues
        self.queue: deque[SampledSequence] = deque()  # sequences that no process has yet
        self.owed = 0  # tokens that updates must still read
        self.reader = ""  # id of the instance that has read the earlier sequences
        self.running: list[Any] = []  # references to the result and the weights of a call
        self.calls = itertools.count(1)
        self.call = 0
        self.update_s = FIRST_UPDATE_S
        self.failures = 0  # in a row
        self.failures_in_step = 0
        self.imported: dict[str, Any] = {}  # by instance that was started ahead: a reference that is ready once its process is
        self.done: list[DrafterStats] = []  # calls that ended in this step

    def prewarm(self, slot: Slot) -> None:
        """Start a process without a lease."""
        if (instance := self.pool.prewarm(slot)) is not None:
            self.imported[instance.id] = instance.actor.__ray_ready__.remote()

    # ---- while engines work, see `EarlyWork` ---------------------------------------------------------------------

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Queue finished samples."""
        for sample in samples:
            prompt, done, mask = sample.prompt.token_ids, sample.completion, sample.action_mask
            logprobs = done.logprobs if mask is None else np.where(mask, done.logprobs, np.float32(np.nan))
            tokens = np.concatenate([np.array(prompt, np.int32), done.token_ids])
            if sample.written_tokens:  # none in a failed episode
                self.queue.append(SampledSequence(tokens, np.concatenate([np.full(len(prompt), np.nan, np.float32), logprobs])))
                self._owe([self.queue[-1]])
        while sum(len(sequence.tokens) for sequence in self.queue) > KEPT_TOKENS:
            self.queue.popleft()

    def _owe(self, sequences: Iterable[SampledSequence]) -> None:
        sampled = sum(int(np.count_nonzero(~np.isnan(one.logprobs))) for one in sequences)
        self.owed = min(self.owed + PASSES * sampled, PASSES * KEPT_TOKENS)

    @property
    def wants_slot(self) -> bool:
        """Whether there is work and a process that can do it at once. A process that still imports would hold a slot without work."""
        has_work = self.owed > 0 and not self.running and self.failures < MAX_FAILURES
        return has_work and (not self.pool.parked or any(map(self._is_ready, self.pool.parked)))

    def _is_ready(self, instance: Instance) -> bool:
        return instance.started or (instance.id in self.imported and bool(ray.wait([self.imported[instance.id]], timeout=0)[0]))

    def refs(self) -> list[Any]:
        return self.running[:1]

    def start_ahead(self, leases: list[Lease], seconds: float) -> list[Lease]:
        """Train under one of the leases, if the tail of `seconds` has time for two updates. Returns the leases that are not used."""
        if not leases or not self.wants_slot or seconds < 2 * self.update_s:
            return leases
        parked = [instance for instance in self.pool.parked if any(self.pool.fits(instance, lease.slot) for lease in leases)]
        if not parked:
            self.prewarm(leases[0].slot)
        if not any(map(self._is_ready, parked)):
            return leases
        left = self.pool.resize(1, leases, need=0)
        if not self.pool.working:  # the leases are of a lost node
            return left
        instance, sequences = self.pool.working[0], list(self.queue)
        if instance.id != self.reader:  # it has none of the sequences that another process has read
            self.reader, self.owed = instance.id, 0
            self._owe(sequences)
            if not self.owed:
                return [*left, *self.pool.park(instance)]
        self.queue.clear()
        weights, moments = (None, None) if instance.version == self.version else (self.weights, self.moments)
        self.call, instance.version = next(self.calls), self.version
        self.running = instance.actor.train.options(num_returns=2).remote(
            self.call, sequences, self.owed, min(CALL_S, seconds), len(instance.leases), weights, moments
        )
        return left

    def done_ahead(self) -> list[Lease]:
        """Collect a call that has ended, and return its lease."""
        return self._collect(0.0) if self.running and ray.wait(self.running[:1], timeout=0)[0] else []

    # ---- the end of a rollout -------------------------------------------------------------------------------------

    def finish(self) -> list[Lease]:
        """End the running call after its current update, and return its lease."""
        if not self.running:
            return []
        self.pool.working[0].actor.stop.options(concurrency_group="control").remote(self.call)
        return self._collect(STOP_S)

    def _collect(self, seconds: float) -> list[Lease]:
        instance, (result, weights), self.running = self.pool.working[0], self.running, []
        try:
            done: DrafterStats = get(result, seconds, "the drafter's update")
            self.context.record_start(instance)
        except (RayError, RunError) as error:
            if lost_on_the_way(result):  # the weights were lost with their node: begin again
                self.weights = None
            return self._end_failed(error)
        self.failures = 0
        self.pool.ledger.spans([lease.id for lease in instance.leases], done.spans)
        if done.updates:
            self.version, self.weights, self.update_s = self.version + 1, weights, done.update_s
            instance.version = self.version
        self.owed = max(0, self.owed - done.tokens)
        self.done.append(done)
        return self.pool.park(instance)

    def _end_failed(self, error: Exception) -> list[Lease]:
        """End the process of a failed call, and return its lease. Its sequences and optimizer moments are lost."""
        instance = self.pool.working[0]
        leases, why = instance.leases, instance.failure() or reason_of(error)
        self.pool.end(instance)
        self.imported.pop(instance.id, None)
        self.failures += 1
        self.failures_in_step += 1
        goes_on = "a new one continues" if self.failures < MAX_FAILURES else "the drafter is no longer trained"
        self.context.record.progress.message(f"the drafter's process failed, so {goes_on}: {why}")
        leases = self.context.leases.without_lost(leases)
        if leases and self.failures < MAX_FAILURES:
            self.prewarm(instance.slot)
        return leases

    def metrics(self) -> JsonObject:
        """Return metrics since the last call."""
        done, self.done = self.done, []
        updates = sum(report.updates for report in done)
        metrics: JsonObject = {"drafter/version": self.version, "drafter/updates": updates, "drafter/failures": self.failures_in_step}
        self.failures_in_step = 0
        metrics["drafter/train_s"] = sum(span.to_s - span.from_s for report in done for span in report.spans)
        if updates:
            metrics["drafter/loss"] = sum(report.updates * report.loss for report in done) / updates
            metrics["drafter/kl"] = sum(report.updates * report.kl for report in done) / updates
        return metrics

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def files(self) -> Files:
        """Return the newest weights as a file, with the optimizer's moments if the process that made them lives."""
        if self.weights is None:
            return {}
        try:
            arrays = dict(get(self.weights, FETCH_S, "the drafter's weights"))
            for instance in self.pool.parked:
                if (instance.id, instance.version) == (self.reader, self.version):
                    moments = get(instance.actor.moments.remote(), FETCH_S, "the drafter's moments")
                    arrays |= {MOMENTS + name: array for name, array in moments.items()}
        except (RayError, RunError) as error:
            self.context.record.progress.message(f"the checkpoint has no weights of the drafter: {reason_of(error)}")
            return {}
        about = {"version": str(self.version), "drafter": self._origin}
        return {FILE: save_tensors({name: as_tensor(array) for name, array in arrays.items()}, about)}

    def restore(self, files: Files) -> None:
        """Continue from a checkpoint's weights and moments, unless they are of another drafter than the recipe's."""
        if FILE not in files:
            return
        about = read_metadata(files[FILE])
        if (origin := about["drafter"]) != self._origin:
            self.context.record.progress.message(
                f"the checkpoint's drafter began as {origin}, so {self._origin} starts again: settings of rollout.drafter have changed"
            )
            return
        self.version = int(about["version"])
        arrays = {name: as_numpy(tensor).copy() for name, tensor in load_tensors(files[FILE]).items()}
        moments = {name.removeprefix(MOMENTS): arrays.pop(name) for name in [*arrays] if name.startswith(MOMENTS)}
        self.weights, self.moments = ray.put(arrays), ray.put(moments) if moments else None

    @property
    def _origin(self) -> str:
        """Origin of the drafter's initial weights."""
        rollout = self.context.recipe.rollout
        random = f"{rollout.drafter_layers} random layers of width {rollout.drafter_hidden_size}"
        return rollout.drafter or random
