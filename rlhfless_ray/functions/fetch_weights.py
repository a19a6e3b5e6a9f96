"""Load a weight version into the instances of a worker pool."""

from __future__ import annotations

from rlhfless_ray.functions.instance import Instance, State
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.types import BASE, WeightVersion


def fetch_weights(pool: WorkerPool, weights: WeightVersion) -> None:
    """Make every working instance load this version unless it has it."""
    for instance in pool.working:
        fetch_into(instance, weights)


def wake(instance: Instance) -> None:
    """Make a parked instance prepare its memory before there are weights to load."""
    instance.actor.wake.remote()


def fetch_into(instance: Instance, weights: WeightVersion) -> None:
    """Make the instance load this version unless it has it. The call precedes its next rollout in the actor's queue."""
    if instance.version != weights.version:
        first, *more = shards = weights.shards_for(instance.slot.node) or (None,)
        base = () if weights.base is None and not more else (weights.base,)
        # each of several members maps the shards by itself
        refs = {"refs": {weights.version: shards, BASE: base}} if instance.width > 1 else {}
        instance.loading = instance.actor.load.remote(weights.version, first, weights.digests, *base, *more, **refs)
        instance.version = weights.version
    instance.state = State.READY
