"""The worker groups of a run, learner, critic and reference, which take turns under the same leases."""

from __future__ import annotations

from collections.abc import Callable

from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import WeightVersion
from rlhfless_ray.weights.model_folder import with_weights
from rlhfless_ray.weights.tensor_file import Content, Files

OF_CRITIC = "critic_"  # prefix of the critic's files in a checkpoint
APART_S = 2.0  # timeout for devices of the reference's own


class ColocatedGroups:
    def __init__(self, context: RunContext, learner: WorkerGroup, critic: WorkerGroup | None, reference: WorkerGroup | None) -> None:
        self.context, self.learner, self.critic, self.reference = context, learner, critic, reference
        self.keeps_gradients = False  # the learner has accumulated gradients: on GPU it stays on its devices

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
        """Give the worker group its leases, those of the group that worked before it first."""
        context = self.context
        for other in self.all:
            holds = other is self.learner and self.keeps_gradients and context.leases.resource == "gpu"  # gradients are on its devices
            if other is not worker_group and other.working and not holds:
                context.broker.put(other.park())
        if not worker_group.working:  # on GPU it may have kept its devices, with gradients on them
            context.broker.staff(worker_group)
        # the learner works after the others: keep the leases that it will need
        kept = 0 if worker_group is self.learner else max(0, self.learner.slots - sum(len(i.leases) for i in worker_group.by_rank))
        context.broker.release(keep=kept)

    @property
    def learner_nodes(self) -> set[str]:
        """The nodes of the learner's ranks, where its weights are published."""
        return {instance.slot.node for instance in self.learner.by_rank}

    @property
    def learner_slots(self) -> int:
        return self.learner.slots

    # ---- models and state -------------------------------------------------------------------------------------

    def safe(self, weights: WeightVersion) -> WeightVersion:
        """Return the version once engines cannot lose it, see `WorkerGroup.safe`. Call between phases: it may need leases."""
        safe = self.learner.safe(weights)
        if self.learner.working:
            self.context.broker.put(self.learner.park())
        return safe

    def open_reference(self, files: Files, loopback: bool) -> None:
        """Load the initial policy into the reference, and park it."""
        if self.reference is None:
            return
        import ray

        context, held, ranks = self.context, [], self.reference.ranks
        if context.leases.resource == "gpu":  # gradients made ahead keep the learner's devices: it shares them only if there are no others
            held = context.broker.take()
            context.broker.put(context.leases.collect(context.leases.ask(ranks), self.reference.pool.kind, APART_S))
            if len(context.broker.free) < ranks:
                context.broker.put(held)
                held = []
        self.turn(self.reference)
        self.reference.build(lambda: ray.put(files), loopback, None)
        context.broker.put([*self.reference.park(), *held])

    def open_critic(self, files: Files, loopback: bool, checkpoint: Files | None) -> None:
        """Load the critic from a model folder's files, or from those of a checkpoint, and park it."""
        if self.critic is None:
            return
        import ray

        state = None if checkpoint is None else _of_critic(checkpoint)
        self.turn(self.critic)
        self.critic.build(lambda: ray.put(files), loopback, ray.put(state) if state else None)
        self.context.broker.put(self.critic.park())

    def snapshot(self, deadline_s: float | None = None) -> Files:
        """Return the files of learner and critic. Those of the critic have a prefix."""
        asked = [(worker_group, worker_group.ask_snapshot()) for worker_group in self.learners]
        found: Files = {}
        for worker_group, refs in asked:
            prefix = OF_CRITIC if worker_group is self.critic else ""
            found |= {prefix + name: content for name, content in worker_group.snapshot(deadline_s, refs).items()}
        return found

    @property
    def kept_now(self) -> bool:
        """Whether every learning group has a snapshot of its current state, possibly a pending one."""
        return all(worker_group.recovery.has_now for worker_group in self.learners)

    def keep(self) -> None:
        """Start the snapshots that are due."""
        for worker_group in self.learners:
            worker_group.keep()

    def saved(self, load: Callable[[], Files]) -> None:
        """Remember that the current state is on disk, where `load` reads it."""
        self.learner.recovery.saved(load)
        if self.critic is not None:
            self.critic.recovery.saved(lambda: _of_critic(load()))

    def pools(self) -> list[WorkerPool]:
        return [worker_group.pool for worker_group in self.all]

    def forget(self) -> None:
        """Drop all references after the processes have ended."""
        for worker_group in self.all:
            worker_group.forget()

    def policy_model(self, files: Files) -> Files:
        """Return the policy's model folder, adapters merged. `files`: tokenizer and other files for it."""
        return with_weights(files, self._merged(self.learner))

    def critic_model(self, files: Files) -> Files:
        """Return the critic's model folder, adapters merged. `files`: tokenizer and other files for it."""
        assert self.critic is not None
        adapts = self.context.recipe.lora.rank > 0
        weights = self._merged(self.critic) if adapts else self.critic.saved(self.critic.snapshot()["model.safetensors"])
        return {**files, "config.json": self.critic.config(), "model.safetensors": weights}

    def _merged(self, worker_group: WorkerGroup) -> Content:
        self.turn(worker_group)
        weights = worker_group.model()
        self.context.broker.put(worker_group.park())
        return weights


def _of_critic(files: Files) -> Files:
    return {name.removeprefix(OF_CRITIC): content for name, content in files.items() if name.startswith(OF_CRITIC)}
