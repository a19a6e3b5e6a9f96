"""Create the worker pools of a run and the broker of their leases, before anything is leased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.rank_actors import CriticActor, LearnerActor, ReferenceActor
from rlhfless_ray.learn.rank_settings import critic_settings, learner_settings, reference_settings
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.prefix.supported_models import unsupported
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.reward_actor import RewardActor
from rlhfless_ray.rollout.drafter_trainer import DrafterActor
from rlhfless_ray.rollout.engine_actor import EngineActor
from rlhfless_ray.rollout.engine_settings import engine_settings
from rlhfless_ray.runtime.pool_maker import PoolMaker
from rlhfless_ray.weights.adapter import choose_publish, not_served
from rlhfless_ray.weights.load_policy import check_kv_cache
from rlhfless_ray.weights.model_folder import config_of, parameter_count, without_weights
from rlhfless_ray.weights.tensor_file import Files


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
        return cls(EngineActor, RewardActor, LearnerActor, EngineActor, CriticActor, ReferenceActor, DrafterActor)


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
    leases: LeaseManager,
    files: Files,
    longest_prompt_tokens: int,
    tokenizer: Any,
    reward_source: Any,
    actors: ActorClasses,
    say: Callable[[str], None],
    drafter_files: Files | None = None,
) -> WorkerPools:
    """Create the pools, all empty. Instances get everything they need as bytes, because nodes lack the driver's files.

    Args:
        files: of the initial policy's folder.
        say: callback for log messages.
        drafter_files: of the model that drafts.
    """
    resource = leases.resource
    if resource == "cpu":
        if recipe.rollout.block_size % 32:
            raise UserError(f"rollout.block_size: vLLM on CPU needs a multiple of 32 (got {recipe.rollout.block_size})")
        check_kv_cache(recipe, files, longest_prompt_tokens)
    if recipe.lora.rank:
        recipe = with_publish(recipe, files, resource)
    prefill = actors.prefill if recipe.rollout.prefix_kv != "off" else None
    unshared = unsupported(config_of(files), recipe.rollout.least_width) if prefill is not None else None
    keeps_pages = (prefill is not None and unshared is None) or recipe.rollout.partial_kv == "keep"
    engine = engine_settings(recipe, longest_prompt_tokens, resource, keeps_pages, tokenizer.eos_token_id)
    config = ray.put(without_weights(files))
    drafter = [ray.put(drafter_files)] if drafter_files else []
    make = PoolMaker(recipe, leases, files, say)
    return WorkerPools(
        make.broker,
        make.faults,
        make.engines("rollout", actors.rollout, engine, config, *drafter, labels=recipe.rollout.nodes),
        make.reward(actors.reward, reward_source),
        make.worker_group("learn", actors.learner, learner_settings, recipe.learner.ranks, "learner"),
        make.engines("prefill", prefill, replace(engine, speculation="off"), config) if prefill is not None else None,
        make.worker_group("critic", actors.critic, critic_settings, recipe.critic.ranks) if recipe.algorithm.has_critic else None,
        make.worker_group("reference", actors.reference, reference_settings, recipe.reference.ranks) if recipe.has_reference else None,
        f"KV cannot be shared, and contexts of moved responses are computed again: {unshared}" if unshared else None,
        make.drafter(actors.drafter, drafter) if drafter and recipe.rollout.drafter_train == "on" and actors.drafter else None,
    )


def with_publish(recipe: Recipe, files: Files, resource: str) -> Recipe:
    """Return the recipe with `lora.publish` resolved to `merged` or `adapter`."""
    lora = recipe.lora
    served = why_not_served(recipe, files) is None and recipe.rollout.partial_kv != "keep"
    publish = choose_publish(lora.publish, served, resource, parameter_count(files), recipe.rollout.max_tokens)
    return recipe.with_settings({"lora.publish": publish})


def check_adapter(recipe: Recipe, files: Files) -> None:
    """Raise UserError if `lora.publish` asks engines for an adapter that they cannot hold."""
    if recipe.lora.publish == "adapter" and (reason := why_not_served(recipe, files)):
        raise UserError(f"lora.publish: {reason}; set merged or auto")


def check_kept_kv(recipe: Recipe, files: Files) -> None:
    """Raise UserError if `rollout.partial_kv: keep` asks for KV pages that engines cannot have."""
    if recipe.rollout.partial_kv == "keep" and (reason := unsupported(config_of(files), recipe.rollout.least_width)):
        raise UserError(f"rollout.partial_kv: the KV of this policy cannot be kept, because {reason}; set recompute")


def why_not_served(recipe: Recipe, files: Files) -> str | None:
    return not_served(config_of(files).get("model_type", ""), recipe.lora.rank, recipe.lora.target_modules)
