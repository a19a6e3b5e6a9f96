"""The functions of a run and the leases they share, hired before anything is leased."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.learn.rank_settings import critic_settings, learner_settings, reference_settings
from rlhfless_ray.local.machine_memory import snapshot_every_steps
from rlhfless_ray.prefix.supported_models import unsupported
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.engine_settings import engine_settings
from rlhfless_ray.weights.load_policy import check_kv_cache
from rlhfless_ray.weights.model_folder import parameter_count, without_weights
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from rlhfless_ray.functions.broker import SlotBroker
    from rlhfless_ray.functions.lease import LeaseManager
    from rlhfless_ray.functions.worker_pool import WorkerPool
    from rlhfless_ray.learn.worker_group import WorkerGroup

GIVE_BACK_AFTER_S = 2.0  # to give 256 MB of KV cache back and touch it again takes 20 to 40 ms of a processor: 1 to 2 % of that


@dataclass(frozen=True)
class ActorClasses:
    """The classes behind the functions. Benchmarks of control overhead put replayed ones in their place."""

    rollout: type
    reward: type
    learner: type
    prefill: type | None = None  # None: these engines keep no pages
    critic: type | None = None
    reference: type | None = None
    computes: bool = True  # engines and learner compute a policy; replayed ones have no log-probabilities to compare

    @classmethod
    def real(cls) -> ActorClasses:
        from rlhfless_ray.learn.rank_actors import CriticActor, LearnerActor, ReferenceActor
        from rlhfless_ray.reward.scoring import RewardActor
        from rlhfless_ray.rollout.prefill_actor import PageActor

        return cls(PageActor, RewardActor, LearnerActor, PageActor, CriticActor, ReferenceActor)


@dataclass(frozen=True)
class WorkerPools:
    broker: SlotBroker
    faults: FailureBudget  # one budget for all
    rollout: WorkerPool
    reward: WorkerPool
    worker_group: WorkerGroup
    prefill: WorkerPool | None = None
    critic: WorkerGroup | None = None
    reference: WorkerGroup | None = None
    prefix_blocked: str | None = None  # why there is no prefix KV although the recipe asks for it


def create_worker_pools(
    recipe: Recipe,
    resource: str,
    files: Files,
    longest_prompt_tokens: int,
    reward_source: Any,
    ledger: Ledger,
    folder: Path,
    actors: ActorClasses,
    say: Callable[[str], None],
) -> WorkerPools:
    """The pools, all empty. Everything an instance needs goes along as bytes: a node has none of the driver's files.

    `files`: the first policy's folder; `folder`: the run's, whose path and time name its leases on a shared cluster. `say`: shows
    a message to the user.
    """
    import ray

    from rlhfless_ray.functions.broker import SlotBroker
    from rlhfless_ray.functions.instance import start_actor
    from rlhfless_ray.functions.lease import LeaseManager
    from rlhfless_ray.functions.warm_memory_budget import WarmMemoryBudget
    from rlhfless_ray.functions.worker_pool import WorkerPool
    from rlhfless_ray.learn.recovery import Recovery
    from rlhfless_ray.learn.worker_group import WorkerGroup

    if resource == "cpu" and recipe.rollout.block_size % 32:
        raise UserError(f"rollout.block_size: vLLM on CPU needs a multiple of 32 (got {recipe.rollout.block_size})")
    if resource == "cpu":
        check_kv_cache(recipe, files, longest_prompt_tokens)
    run_id = hashlib.blake2b(f"{folder.resolve()} {time.time_ns()}".encode(), digest_size=4).hexdigest()
    leases = LeaseManager(resource, ledger, recipe.functions.lease_deadline_s, run_id)
    broker = SlotBroker(leases)
    faults = FailureBudget(recipe.functions.max_replacements)
    parked = WarmMemoryBudget(recipe.functions.parked_mb, leases.memory_mb, say)
    ledger.price_of = prices(recipe, resource, leases)
    ledger.parked_share, ledger.slot_mb = recipe.price.parked_share, leases.slot_mb
    ledger.core_per_hour = recipe.price.cpu_slot_per_hour
    wanted = recipe.rollout.prefix_kv != "off" and actors.prefill is not None
    unshared = unsupported(json.loads(bytes(files["config.json"]))) if wanted else None
    config = ray.put(without_weights(files))
    engine = engine_settings(recipe, longest_prompt_tokens, resource, wanted and unshared is None)
    ranks = itertools.cycle(range(recipe.learner.ranks))  # a gang starts whole, also when it starts anew
    source = ray.put(reward_source)  # a reward model's weights are in it

    def start_engine(slot: Any) -> Any:
        return start_actor(actors.rollout, slot, resource, {}, config, engine)

    def start_prefill(slot: Any) -> Any:
        assert actors.prefill is not None
        return start_actor(actors.prefill, slot, resource, {}, config, engine)

    def start_reward(slot: Any) -> Any:
        return start_actor(actors.reward, slot, resource, {}, source, recipe.reward.timeout_s, resource)

    critic_ranks = itertools.cycle(range(recipe.critic.ranks))

    def start_learner(slot: Any) -> Any:
        return start_actor(actors.learner, slot, resource, {}, learner_settings(recipe, next(ranks), resource))

    def start_critic(slot: Any) -> Any:
        assert actors.critic is not None
        return start_actor(actors.critic, slot, resource, {}, critic_settings(recipe, next(critic_ranks), resource))

    reference_ranks = itertools.cycle(range(recipe.reference.ranks))

    def start_reference(slot: Any) -> Any:
        assert actors.reference is not None
        return start_actor(actors.reference, slot, resource, {}, reference_settings(recipe, next(reference_ranks), resource))

    snapshot_steps = snapshot_every_steps(recipe, parameter_count(files))
    if snapshot_steps == 0 and recipe.checkpoint.memory_every_steps is None:
        say(
            "the learner's state is not copied in memory, because two copies would take more than a quarter of this machine's; a "
            "lost learner continues from the newest checkpoint (checkpoint.memory_every_steps)"
        )

    def worker_group(kind: str, start: Callable[[Any], Any], ranks: int, name: str) -> WorkerGroup:
        memory = parked if kind == "reference" else None  # a learner's memory is its state, and stays
        pool = WorkerPool(
            kind,
            start,
            leases,
            ledger,
            float("inf"),
            on_device=True,
            leave_s=recipe.learner.deadline_s,
            faults=faults,
            parked_memory=memory,
        )
        return WorkerGroup(pool, ranks, recipe.learner, broker, name, Recovery(snapshot_steps, say))

    def pool(kind: str, start: Callable[[Any], Any], *, on_device: bool, **more: Any) -> WorkerPool:
        keep_s = recipe.functions.keep_alive_s
        return WorkerPool(kind, start, leases, ledger, keep_s, on_device=on_device, faults=faults, parked_memory=parked, **more)

    return WorkerPools(
        broker,
        faults,
        pool("rollout", start_engine, on_device=True, labels=recipe.rollout.nodes, give_back_after_s=GIVE_BACK_AFTER_S),
        pool(reward_source.pool_kind, start_reward, on_device=reward_source.on_device),
        worker_group("learn", start_learner, recipe.learner.ranks, "learner"),
        pool("prefill", start_prefill, on_device=True, give_back_after_s=GIVE_BACK_AFTER_S) if wanted else None,
        worker_group("critic", start_critic, recipe.critic.ranks, "critic") if recipe.algorithm.has_critic else None,
        worker_group("reference", start_reference, recipe.reference.ranks, "reference") if recipe.has_reference else None,
        f"this policy's KV cannot be shared, and what moves between engines is computed again: {unshared}" if unshared else None,
    )


def prices(recipe: Recipe, resource: str, leases: LeaseManager) -> Callable[[str], float]:
    """Node id → money for an hour of one of its slots."""
    usual = recipe.price.gpu_slot_per_hour if resource == "gpu" else recipe.price.cpu_slot_per_hour
    special = recipe.price.rollout_slot_per_hour
    if special is None:
        return lambda node: usual
    return lambda node: special if node in leases.matching(recipe.rollout.nodes) else usual
