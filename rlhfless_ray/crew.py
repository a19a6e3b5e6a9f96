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

from rlhfless_ray.errors import UserError
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.policy_files import check_kv_cache
from rlhfless_ray.prefix.support import unsupported
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.folder import without_weights

if TYPE_CHECKING:
    from rlhfless_ray.functions.lease import Leases
    from rlhfless_ray.functions.pool import Pool
    from rlhfless_ray.learn.gang import Gang

GIVE_BACK_AFTER_S = 2.0  # to give 256 MB of KV cache back and touch it again takes 20 to 40 ms of a processor: 1 to 2 % of that


@dataclass(frozen=True)
class Actors:
    """The classes behind the functions. Benchmarks of control overhead put replayed ones in their place."""

    rollout: type
    reward: type
    learner: type
    prefill: type | None = None  # None: these engines keep no pages
    critic: type | None = None
    reference: type | None = None

    @classmethod
    def real(cls) -> Actors:
        from rlhfless_ray.learn.actor import CriticActor, LearnerActor, ReferenceActor
        from rlhfless_ray.prefix.actor import PageActor
        from rlhfless_ray.reward.score import RewardActor

        return cls(PageActor, RewardActor, LearnerActor, PageActor, CriticActor, ReferenceActor)


@dataclass(frozen=True)
class Crew:
    leases: Leases
    rollout: Pool
    reward: Pool
    gang: Gang
    prefill: Pool | None = None
    critic: Gang | None = None
    reference: Gang | None = None
    prefix_blocked: str | None = None  # why there is no prefix KV although the recipe asks for it


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
    ledger.parked_share, ledger.slot_mb = recipe.price.parked_share, leases.slot_mb
    ledger.core_per_hour = recipe.price.cpu_slot_per_hour
    dump = recipe.model_dump()
    wanted = recipe.rollout.prefix_kv != "off" and actors.prefill is not None
    unshared = unsupported(json.loads(files["config.json"])) if wanted else None
    config = ray.put(without_weights(files))
    engine = {
        "device": resource, "max_model_len": recipe.longest_tokens(longest_prompt_tokens),
        "dtype": recipe.policy.dtype, "trust_remote_code": recipe.policy.trust_remote_code, **dump["rollout"],
        "prefix_kv": wanted and unshared is None,
    }
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
    shared = {"algorithm": dump["algorithm"], "policy": dump["policy"], "seed": recipe.run.seed, "device": resource}

    def start_learner(slot: Any) -> Any:
        own = {"learner": recipe.learner_section(), "temperature": recipe.rollout.temperature, "rank": next(ranks)}
        return start_actor(actors.learner, slot, resource, {}, {**shared, **own})

    def start_critic(slot: Any) -> Any:
        assert actors.critic is not None
        own = {"critic": recipe.critic_section(), "rank": next(critic_ranks)}
        return start_actor(actors.critic, slot, resource, {}, {**shared, **own})

    reference_ranks = itertools.cycle(range(recipe.reference.ranks))

    def start_reference(slot: Any) -> Any:
        assert actors.reference is not None
        own = {
            "policy": dump["policy"], "micro_batch_tokens": recipe.learner.micro_batch_tokens, "device": resource,
            "temperature": recipe.rollout.temperature, "ranks": recipe.reference.ranks, "rank": next(reference_ranks),
        }
        return start_actor(actors.reference, slot, resource, {}, own)

    def gang(kind: str, start: Callable[[Any], Any], ranks: int, name: str) -> Gang:
        pool = Pool(kind, start, leases, ledger, float("inf"), on_device=True, leave_s=recipe.learner.deadline_s)
        return Gang(pool, ranks, recipe.learner, name)

    keep = recipe.functions.keep_alive_s
    return Crew(
        leases,
        Pool(
            "rollout", start_engine, leases, ledger, keep, on_device=True, labels=recipe.rollout.nodes,
            give_back_after_s=GIVE_BACK_AFTER_S,
        ),
        Pool(reward_source.pool_kind, start_reward, leases, ledger, keep, on_device=reward_source.on_device),
        gang("learn", start_learner, recipe.learner.ranks, "learner"),
        Pool("prefill", start_prefill, leases, ledger, keep, on_device=True, give_back_after_s=GIVE_BACK_AFTER_S)
        if wanted else None,
        gang("critic", start_critic, recipe.critic.ranks, "critic") if recipe.algorithm.has_critic else None,
        gang("reference", start_reference, recipe.reference.ranks, "reference") if recipe.has_reference else None,
        f"this policy's KV cannot be shared, and what moves between engines is computed again: {unshared}" if unshared else None,
    )


def prices(recipe: Recipe, resource: str, leases: Leases) -> Callable[[str], float]:
    """Node id → money for an hour of one of its slots."""
    usual = recipe.price.gpu_slot_per_hour if resource == "gpu" else recipe.price.cpu_slot_per_hour
    special = recipe.price.rollout_slot_per_hour
    if special is None:
        return lambda node: usual
    return lambda node: special if node in leases.matching(recipe.rollout.nodes) else usual
