"""Slots a command asks for here, at most and at least, beside the GPUs that OpenRLHF would hold for the whole run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhfless_ray.compat.openrlhf.normalise import Values
from rlhfless_ray.compat.openrlhf.translate import Translation
from rlhfless_ray.local.machine_memory import visible_gpus


class Slots(NamedTuple):
    """A slot is a GPU where the cluster has any, else a core."""

    at_least: int
    at_most: int
    openrlhf_gpus: int


def slots_of(found: Translation) -> Slots:
    """Phases take turns, so the largest of them counts. The learner's number of ranks does not change its results."""

    def wish(key: str, otherwise: int) -> int:
        return int(found.settings.get(key, otherwise))

    v = found.values
    engine = wish("rollout.tensor_parallel", 1)
    from rlhfless_ray.recipe import Recipe

    rollout = Recipe.model_fields["rollout"].default
    most_engines, fewest_engines = wish("rollout.max_actors", rollout.max_actors), wish("rollout.min_actors", rollout.min_actors)
    ranks = wish("learner.ranks", 1)
    rank = wish("learner.tensor_parallel", 1) * wish("learner.ring_attention", 1)
    there = {"ref": v.has_reference and not v["ds.lora.rank"], "critic": v.has_critic, "reward": not v.external_reward}
    others = [v.ranks(model) for model, used in there.items() if used]
    fewest_ranks = rank if found.settings.get("learner.ranks_may_shrink") else ranks
    fewest = max(fewest_engines * engine, fewest_ranks, wish("critic.ranks", 1), wish("reference.ranks", 1))
    return Slots(fewest, max(most_engines * engine, ranks, *others), openrlhf_gpus(v))


def openrlhf_gpus(v: Values) -> int:
    """GPUs in OpenRLHF's placement groups: every group and engine that is not colocated has its own."""
    alone = not v["train.colocate_all"]
    total = v.world("actor")
    if v.has_reference and alone and not v["train.colocate_actor_ref"]:
        total += v.world("ref")
    if alone or v["train.async_enable"]:
        total += v.engines * v["vllm.tensor_parallel_size"]
    reward_model = not v.external_reward
    if v.has_critic and v["train.colocate_critic_reward"]:
        return total + v.world("critic")
    if alone:
        total += (v.world("critic") if v.has_critic else 0) + (v.world("reward") if reward_model else 0)
    return total


def slots_here(settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> int | None:
    """Slots of the private cluster that a run would start on this machine; None: it joins another one."""
    if settings.get("cluster.address") or environment.get("RAY_ADDRESS"):
        return None
    gpus = visible_gpus(environment)
    if gpus and settings.get("functions.slot", "auto") != "cpu":
        return gpus
    return int(settings.get("cluster.cpus") or len(os.sched_getaffinity(0)))


def fit(found: Translation, environment: Mapping[str, str] = os.environ) -> str:
    """Start with as many ranks as there are slots where more are asked for (OpenRLHF waits for ever). Says so, or nothing."""
    here, said = slots_here(found.settings, environment), []
    for name in ("learner", "critic", "reference"):
        key = f"{name}.ranks"
        ranks = int(found.settings.get(key, 1))
        if here is not None and ranks > here and key not in found.own:
            found.settings[key] = here
            said.append(f"{ranks} ranks of the {name} are asked for and {here} slots exist: it starts with {here}, with the same results")
    return "; ".join(said)
