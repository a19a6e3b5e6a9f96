"""Create the worker pools of a run and the broker of their leases, before anything is leased."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.learn.rank_settings import critic_settings, learner_settings, reference_settings
from rlhfless_ray.local.machine_memory import snapshot_every_steps
from rlhfless_ray.local.process_memory import large_page_environment
from rlhfless_ray.prefix.supported_models import unsupported
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.drafter_trainer import DrafterSettings
from rlhfless_ray.rollout.engine_settings import engine_settings
from rlhfless_ray.weights.adapter import choose_publish, not_served
from rlhfless_ray.weights.load_policy import check_kv_cache
from rlhfless_ray.weights.model_folder import config_of, parameter_count, without_weights
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from rlhfless_ray.functions.broker import SlotBroker
    from rlhfless_ray.functions.lease import LeaseManager
    from rlhfless_ray.functions.pool_client import PoolClient
    from rlhfless_ray.functions.worker_pool import WorkerPool
    from rlhfless_ray.learn.worker_group import WorkerGroup

GIVE_BACK_AFTER_S = 2.0  # releasing 256 MB of KV cache and touching it again takes 20-40 ms of CPU time, 1-2 % of that


@dataclass(frozen=True)
class ActorClasses:
    """The actor classes of the functions. Benchmarks of control overhead replace them by replayed ones."""

    rollout: type
    reward: type
    learner: type
    prefill: type | None = None  # None: the engines keep no pages
    critic: type | None = None
    reference: type | None = None
    drafter: type | None = None  # None: no drafter is trained
    computes: bool = True  # whether engines and learner compute a policy, so that log-probabilities can be compared

    @classmethod
    def real(cls) -> ActorClasses:
        from rlhfless_ray.learn.rank_actors import CriticActor, LearnerActor, ReferenceActor
        from rlhfless_ray.reward.scoring import RewardActor
        from rlhfless_ray.rollout.drafter_trainer import DrafterActor
        from rlhfless_ray.rollout.prefill_actor import PageActor

        return cls(PageActor, RewardActor, LearnerActor, PageActor, CriticActor, ReferenceActor, DrafterActor)


@dataclass(frozen=True)
class WorkerPools:
    broker: SlotBroker
    faults: FailureBudget  # shared by all functions
    rollout: WorkerPool
    reward: WorkerPool
    worker_group: WorkerGroup
    prefill: WorkerPool | None = None
    critic: WorkerGroup | None = None
    reference: WorkerGroup | None = None
    prefix_blocked: str | None = None  # why there is no prefix KV although the recipe asks for it
    drafter: WorkerPool | None = None  # trains the drafter


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
    source: PoolClient | None = None,
    drafter_files: Files | None = None,
) -> WorkerPools:
    """Create the pools, all empty. Instances get everything they need as bytes, because nodes lack the driver's files.

    Args:
        files: of the initial policy's folder.
        folder: the run folder. Its path and the time name the run's leases on a shared cluster.
        say: callback for log messages.
        source: the pool of slots that the runs of the cluster share; None: Ray's queue.
        drafter_files: of the model that drafts.
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
    if recipe.lora.rank:
        recipe = with_publish(recipe, files, resource)
    run_id = hashlib.blake2b(f"{folder.resolve()} {time.time_ns()}".encode(), digest_size=4).hexdigest()
    leases = LeaseManager(resource, ledger, recipe.functions.lease_deadline_s, run_id, source)
    broker = SlotBroker(leases)
    faults = FailureBudget(recipe.functions.max_replacements)
    parked = WarmMemoryBudget(recipe.functions.parked_mb, leases.nodes.memory_mb, say, source)
    ledger.price_of = prices(recipe, resource, leases)
    ledger.parked_share, ledger.slot_mb = recipe.price.parked_share, leases.nodes.slot_mb
    ledger.core_per_hour = recipe.price.cpu_slot_per_hour
    wanted = recipe.rollout.prefix_kv != "off" and actors.prefill is not None
    unshared = _no_pages(recipe, files) if wanted else None
    config = ray.put(without_weights(files))
    drafter = [ray.put(drafter_files)] if drafter_files else []
    engine = engine_settings(recipe, longest_prompt_tokens, resource, wanted and unshared is None)
    reward_ref = ray.put(reward_source)  # may contain a reward model's weights

    def starter(cls: type | None, *arguments: Any) -> Callable[[Any], Any]:
        assert cls is not None
        return lambda slot: start_actor(cls, slot, resource, {}, *arguments)

    def pool(kind: str, start: Callable[[Any], Any], *, on_device: bool, **options: Any) -> WorkerPool:
        keep_s = recipe.functions.keep_alive_s
        return WorkerPool(kind, start, leases, ledger, keep_s, on_device=on_device, faults=faults, parked_memory=parked, **options)

    snapshot_steps = snapshot_every_steps(recipe, parameter_count(files))
    if snapshot_steps == 0 and recipe.checkpoint.memory_every_steps is None:
        say(
            "the learner's state is not copied in memory, because two copies would take more than a quarter of this machine's; a "
            "lost learner continues from the newest checkpoint (checkpoint.memory_every_steps)"
        )

    pages = large_page_environment(parameter_count(files)) if resource == "cpu" else {}

    def worker_group(kind: str, cls: type | None, settings: Callable[..., Any], ranks: int, name: str) -> WorkerGroup:
        assert cls is not None
        numbers = itertools.cycle(range(ranks))  # all ranks of a group start together, even after a loss
        group_pool = WorkerPool(
            kind,
            lambda slot: start_actor(cls, slot, resource, pages, settings(recipe, next(numbers), resource)),
            leases,
            ledger,
            float("inf"),
            on_device=True,
            leave_s=recipe.learner.deadline_s,
            faults=faults,
            parked_memory=parked if kind == "reference" else None,  # a learner's memory is its state, which must stay
        )
        shares_base = kind == "learn" and recipe.lora.publish == "adapter"
        return WorkerGroup(group_pool, ranks, recipe.learner, broker, name, Recovery(snapshot_steps, say), shares_base)

    def start_engine(slot: Any) -> Any:
        return start_actor(actors.rollout, slot, resource, {}, config, replace(engine, tensor_parallel=rollout.width), *drafter)

    engines: dict[str, Any] = {"on_device": True, "give_back_after_s": GIVE_BACK_AFTER_S}
    rollout = pool("rollout", start_engine, labels=recipe.rollout.nodes, width=recipe.rollout.least_width, **engines)
    reward = starter(actors.reward, reward_ref, recipe.reward.timeout_s, resource)
    trains = bool(drafter) and recipe.rollout.drafter_train == "on" and actors.drafter is not None
    section = recipe.rollout
    learns = DrafterSettings(section.drafter_learning_rate, section.temperature, "cuda" if resource == "gpu" else "cpu")
    has_critic, has_reference = recipe.algorithm.has_critic, recipe.has_reference
    return WorkerPools(
        broker,
        faults,
        rollout,
        pool(reward_source.pool_kind, reward, on_device=reward_source.on_device),
        worker_group("learn", actors.learner, learner_settings, recipe.learner.ranks, "learner"),
        pool("prefill", starter(actors.prefill, config, replace(engine, speculation="off")), **engines) if wanted else None,
        worker_group("critic", actors.critic, critic_settings, recipe.critic.ranks, "critic") if has_critic else None,
        worker_group("reference", actors.reference, reference_settings, recipe.reference.ranks, "reference") if has_reference else None,
        f"KV cannot be shared, and contexts of moved responses are computed again: {unshared}" if unshared else None,
        pool("drafter", starter(actors.drafter, *drafter, learns), on_device=True) if trains else None,
    )


def _no_pages(recipe: Recipe, files: Files) -> str | None:
    """Return why engines cannot exchange KV pages, or None if they can."""
    if recipe.rollout.tensor_parallel != 1:
        return f"engines of rollout.tensor_parallel = {recipe.rollout.tensor_parallel} keep no pages"
    return unsupported(config_of(files))


def with_publish(recipe: Recipe, files: Files, resource: str) -> Recipe:
    """Return the recipe with `lora.publish` resolved to `merged` or `adapter`."""
    lora = recipe.lora
    served = why_not_served(recipe, files) is None
    publish = choose_publish(lora.publish, served, resource, parameter_count(files), recipe.rollout.max_tokens)
    return recipe.model_copy(update={"lora": lora.model_copy(update={"publish": publish})})


def check_adapter(recipe: Recipe, files: Files) -> None:
    """Raise UserError if `lora.publish` asks engines for an adapter that they cannot hold."""
    if recipe.lora.publish == "adapter" and (reason := why_not_served(recipe, files)):
        raise UserError(f"lora.publish: {reason}; set merged or auto")


def why_not_served(recipe: Recipe, files: Files) -> str | None:
    width = recipe.rollout.tensor_parallel
    if width != 1 and (width != "auto" or recipe.lora.publish == "auto"):  # with a set `adapter`, an automatic width stays at 1
        return f"engines of rollout.tensor_parallel = {width} cannot hold adapters"
    return not_served(config_of(files).get("model_type", ""), recipe.lora.rank, recipe.lora.target_modules)


def prices(recipe: Recipe, resource: str, leases: LeaseManager) -> Callable[[str], float]:
    """Return a function from node id to the price per hour of one of its slots."""
    usual = recipe.price.slot_per_hour(resource)
    special = recipe.price.rollout_slot_per_hour
    if special is None:
        return lambda node: usual
    return lambda node: special if node in leases.nodes.slots(recipe.rollout.nodes) else usual
