"""Weights and optimizer state by parameter name, whole, whatever the number of ranks and the ZeRO stage.

Checkpoints written from these dicts can be read with another number of ranks or another stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"  # the float32 weights behind bfloat16 ones: most updates are smaller than a bfloat16 step


def full_weights(engine: Any, stage: int, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """{parameter name: whole tensor, on CPU}, of the wanted ones. Every rank must call it at ZeRO 3 (it gathers)."""
    import deepspeed

    module = engine.module.model
    if stage < 3:
        return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items() if wanted(name)}
    weights = {}
    for name, parameter in module.named_parameters():
        if not wanted(name):
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().cpu().clone()
    return weights


def full_moments(engine: Any, stage: int) -> dict[str, Tensor]:
    """{"<moment>.<parameter name>": whole float32 tensor, on CPU} of what is trained; empty before the first step. A policy in
    bfloat16 has its float32 weights beside the moments, as "master.<parameter name>". Tensors are views of the live state where one
    rank has it whole on the host."""
    found = {}
    stepped = bool(plain_optimizer(engine).state)  # DeepSpeed cannot be asked before the first step
    for name, parameter in _trained(engine):
        for moment in MOMENTS if stepped else ():
            plain = plain_optimizer(engine).state.get(parameter, {})
            value = plain.get(moment) if stage == 0 else _whole(engine, stage, parameter, moment)
            if value is not None:
                found[f"{moment}.{name}"] = value.detach().float().cpu()
        if parameter.dtype != torch.float32:
            found[f"{MASTER}.{name}"] = _whole(engine, stage, parameter, None).detach().float().cpu()
    return found


def _whole(engine: Any, stage: int, parameter: Tensor, moment: str | None) -> Tensor:
    """A whole moment (None: the float32 weight). Every rank must call it. DeepSpeed's getters make a copy also for a single rank."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if stage < 3 and torch.distributed.get_world_size() == 1 and (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
        part = mapping.get_hp_fragment(moment)
        if part.numel() == parameter.numel():
            return part.reshape(parameter.shape)
    return safe_get_full_fp32_param(parameter) if moment is None else safe_get_full_optimizer_state(parameter, moment)


def _trained(engine: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in engine.module.model.named_parameters() if parameter.requires_grad)


def plain_optimizer(engine: Any) -> torch.optim.Optimizer:
    """torch's AdamW, below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def link_moments(engine: Any) -> None:
    """Make ZeRO 1 and 2 find the moments of every parameter, also after they have moved. DeepSpeed does so by itself in the step
    of the first group of parameters, when those of the other groups are not there yet."""
    if plain_optimizer(engine).state:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def restore_moments(engine: Any, stage: int, moments: dict[str, Tensor], steps: int) -> None:
    """Put back what `full_moments` took, and the number of optimizer steps done."""
    optimizer = plain_optimizer(engine)
    stepped = any(key.startswith(MOMENTS) for key in moments)
    if stepped:  # DeepSpeed and torch make the state in the first step only
        groups = (group["params"] for group in optimizer.param_groups)
        for parameter in engine.optimizer.fp32_partitioned_groups_flat if stage == 3 else itertools.chain(*groups):
            optimizer.state[parameter] = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        if stage in (1, 2):
            engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in _trained(engine):
        for moment in MOMENTS if stepped else ():
            _put(engine, stage, parameter, moments[f"{moment}.{name}"], moment)
        if f"{MASTER}.{name}" in moments:
            _put(engine, stage, parameter, moments[f"{MASTER}.{name}"], None)
    for parameter, state in optimizer.state.items():
        state["step"] = torch.tensor(float(steps), device=parameter.device)  # a fused step reads it there


def _put(engine: Any, stage: int, parameter: Tensor, value: Tensor, moment: str | None) -> None:
    """Write a whole moment (None: the float32 weight) to where this rank keeps its part."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    value = value.to(parameter.device, torch.float32)
    if stage == 0:
        plain_optimizer(engine).state[parameter][moment].copy_(value)
    elif stage == 3:  # DeepSpeed's own setter fails where the ranks' parts are padded
        zero = engine.optimizer
        part, _ = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=moment)
        start = part.numel() * zero._get_param_partition_rank(parameter)
        piece = value.flatten()[start : start + part.numel()]
        part[: piece.numel()].data.copy_(piece)
    elif moment is None:
        safe_set_full_fp32_param(parameter, value)
    else:
        safe_set_full_optimizer_state(parameter, value, moment)
