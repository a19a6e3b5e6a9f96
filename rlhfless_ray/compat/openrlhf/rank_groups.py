"""Ranks that share sequences or one copy of a model: the settings, and why a command does without."""

from __future__ import annotations

import json
from collections.abc import Callable

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.normalise import Values

DIVIDED = "divides the work on a sequence between GPUs, which changes no result; ranks divide the batch and ZeRO the state here"
MATRICES = "divides matrices between GPUs, which changes no result; --elastic.learner.tensor_parallel divides them here"
SLICED_INSTEAD = "ranks share sequences instead"

# Own settings that decide how ranks share sequences or a copy of the model
DECIDING = {
    *(f"{model}.{key}" for model in ("learner", "critic") for key in ("ranks", "tensor_parallel", "sequence_parallel", "path")),
    *("learner.zero_stage", "policy.path", "lora.rank", "lora.dropout", "algorithm.loss.router_aux"),
}


def slices(x: int, v: Values) -> JsonObject:
    """Return the settings of ranks that share sequences, none if a model does not allow it."""
    return {} if _why_not_sliced(x, v) else _of_learners("sequence_parallel", x, v)


def divides(x: int, v: Values) -> JsonObject:
    """Return the settings of ranks that share one copy of a model, none if a model does not allow it."""
    return {} if _why_not_divided(x, v) else _of_learners("tensor_parallel", x, v)


def _of_learners(key: str, x: int, v: Values) -> JsonObject:
    """Return the settings of policy and critic, none for groups of one rank."""
    return {f"{section}.{key}": x for section in ("learner", *(("critic",) if v.has_critic else ()))} if x > 1 else {}


def not_sliced(v: Values) -> str:
    return with_reason(DIVIDED, _why_not_sliced(v["ds.ring_attn_size"], v))


def not_divided(v: Values) -> str:
    return with_reason(MATRICES, _why_not_divided(v["ds.tensor_parallel_size"], v))


def with_reason(reading: str, why: str) -> str:
    return f"{reading} ({why})" if why else reading


def _why_not_sliced(size: int, v: Values) -> str:
    if size > 1 and v["actor.aux_loss_coef"]:
        return f"a rank's routers would see a slice, which {v.named('actor.aux_loss_coef')} does not allow"
    dropout = v["ds.lora.dropout"] if v["ds.lora.rank"] else 0
    return next(filter(None, (why_not_sliced(size, ranks, dropout, folder) for ranks, folder in _learners(v))), "")


def _why_not_divided(size: int, v: Values) -> str:
    if size <= 1:
        return ""
    if slices(v["ds.ring_attn_size"], v):
        return SLICED_INSTEAD
    return next(filter(None, (why_not_divided(size, ranks, v["ds.zero_stage"], folder) for ranks, folder in _learners(v))), "")


def _learners(v: Values) -> list[tuple[int, str | None]]:
    """Return the ranks and the model folder of the policy, and of the critic if there is one."""
    return [(v.ranks(model), v[f"{model}.model_name_or_path"]) for model in ("actor", *(("critic",) if v.has_critic else ()))]


def why_not_sliced(size: int, ranks: int, dropout: float, folder: str | None) -> str:
    """Return why `size` of a model's ranks cannot share sequences here, or an empty string. `dropout`: of its adapters."""
    from rlhfless_ray.learn.model_checks import slicing_refusal

    return _why_not_shared(size, ranks, folder, slicing_refusal, "dropout of adapters is drawn for whole sequences" if dropout else "")


def why_not_divided(size: int, ranks: int, zero_stage: int, folder: str | None) -> str:
    """Return why `size` of a model's ranks cannot share one copy of it here, or an empty string."""
    from rlhfless_ray.learn.model_checks import refusal

    return _why_not_shared(size, ranks, folder, refusal, "DeepSpeed divides matrices with ZeRO stages 0 to 2" if zero_stage == 3 else "")


def _why_not_shared(size: int, ranks: int, folder: str | None, refusal: Callable[[JsonObject, int], str | None], other: str = "") -> str:
    """Return why groups of `size` of a model's ranks cannot share its work, or an empty string.

    `refusal`: returns what in its config.json is against it. `other`: what the command has against it.
    """
    from rlhfless_ray.weights.load_policy import cached_folder

    if size <= 1:
        return ""
    if ranks % size:
        return f"{size} does not divide the number of ranks, {ranks}"
    if other:
        return other
    try:
        config = json.loads((cached_folder(folder or "") / "config.json").read_bytes())
    except (OSError, ValueError):
        return f"the config.json of `{folder}` is not on this machine, so it is not known whether ranks can share it or its sequences"
    return refusal(config, size) or ""
