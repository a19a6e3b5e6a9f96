"""The functions of a run and the leases they share, hired before anything is leased."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.errors import UserError
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.policy_files import check_kv_cache
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.folder import without_weights

if TYPE_CHECKING:
    from rlhfless_ray.functions.lease import Leases
    from rlhfless_ray.functions.pool import Pool
    from rlhfless_ray.learn.gang import Gang


@dataclass(frozen=True)
class Actors:
    """The classes behind the functions. Benchmarks of control overhead put replayed ones in their place."""

    rollout: type
    reward: type
    learner: type

    @classmethod
    def real(cls) -> Actors:
        from rlhfless_ray.learn.actor import LearnerActor
        from rlhfless_ray.reward.score import RewardActor
        from rlhfless_ray.rollout.actor import RolloutActor

        return cls(RolloutActor, RewardActor, LearnerActor)


@dataclass(frozen=True)
class Crew:
    leases: Leases
    rollout: Pool
    reward: Pool
    gang: Gang


def hire(
    recipe: Recipe, resource: str, files: dict[str, bytes], longest_prompt_tokens: int, reward_source: Any, ledger: Ledger,
    folder: Path, actors: Actors,
) -> Crew:
    """The pools, all empty. Everything an instance needs goes along as bytes: a node has none of the driver's files.

    `files`: the first policy's folder; `folder`: the run's, whose path and time name its leases on a shared cluster.
    """
    import ray

    from rlhfless_ray.functions.instance import start_actor
    from rlhfless_ray.functions.lease import Leases
    from rlhfless_ray.functions.pool import Pool
    from rlhfless_ray.learn.gang import Gang

    if resource == "cpu" and recipe.rollout.block_size % 32:
        raise UserError(f"rollout.block_size: vLLM on CPU needs a multiple of 32 (got {recipe.rollout.block_size})")
    if resource == "cpu":
        check_kv_cache(recipe, files, longest_prompt_tokens)
    run_id = hashlib.blake2b(f"{folder.resolve()} {time.time_ns()}".encode(), digest_size=4).hexdigest()
    leases = Leases(resource, ledger, recipe.functions.lease_deadline_s, run_id)
    ledger.price_of = prices(recipe, resource, leases)
    dump = recipe.model_dump()
    config = ray.put(without_weights(files))
    engine = {
        "device": resource, "max_model_len": recipe.rollout.longest_tokens(longest_prompt_tokens),
        "dtype": recipe.policy.dtype, "trust_remote_code": recipe.policy.trust_remote_code, **dump["rollout"],
    }
    ranks = itertools.count()
    source = ray.put(reward_source)  # a reward model's weights are in it

    def start_engine(slot: Any) -> Any:
        return start_actor(actors.rollout, slot, resource, {}, config, engine)

    def start_reward(slot: Any) -> Any:
        return start_actor(actors.reward, slot, resource, {}, source, recipe.reward.timeout_s, resource)

    def start_learner(slot: Any) -> Any:
        sections = {name: dump[name] for name in ("learner", "algorithm", "policy")}
        settings = {
            **sections, "temperature": recipe.rollout.temperature, "seed": recipe.run.seed, "rank": next(ranks), "device": resource,
        }
        return start_actor(actors.learner, slot, resource, {}, settings)

    keep = recipe.functions.keep_alive_s
    return Crew(
        leases,
        Pool("rollout", start_engine, leases, ledger, keep, on_device=True, labels=recipe.rollout.nodes),
        Pool(reward_source.pool_kind, start_reward, leases, ledger, keep, on_device=reward_source.on_device),
        Gang(Pool("learn", start_learner, leases, ledger, float("inf"), on_device=True, leave_s=recipe.learner.deadline_s), recipe),
    )


def prices(recipe: Recipe, resource: str, leases: Leases) -> Callable[[str], float]:
    """Node id → money for an hour of one of its slots."""
    usual = recipe.price.gpu_slot_per_hour if resource == "gpu" else recipe.price.cpu_slot_per_hour
    special = recipe.price.rollout_slot_per_hour
    if special is None:
        return lambda node: usual
    return lambda node: special if node in leases.matching(recipe.rollout.nodes) else usual
