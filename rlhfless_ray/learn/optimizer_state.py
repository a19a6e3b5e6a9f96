"""Weights and optimizer state by parameter name, whole, whatever the number of ranks and the ZeRO stage.

Checkpoints written from these dicts can be read with another number of ranks or another stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"  # the float32 weights behind bfloat16 ones: most updates are smaller than a bfloat16 step


def full_weights(engine: Any, stage: int) -> dict[str, Tensor]:
    """{parameter name: whole tensor, on CPU}. Every rank must call it at ZeRO 3 (it gathers)."""
    import deepspeed

    module = engine.module.model
    if stage < 3:
        return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    weights = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().cpu().clone()
    return weights


def full_moments(engine: Any, stage: int) -> dict[str, Tensor]:
    """{"<moment>.<parameter name>": whole float32 tensor, on CPU}; empty before the first optimizer step. A policy in
    bfloat16 has its float32 weights beside the moments, as "master.<parameter name>"."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.model.named_parameters():
        for moment in MOMENTS:
            if stage == 0:
                value = plain_optimizer(engine).state.get(parameter, {}).get(moment)
            else:
                value = safe_get_full_optimizer_state(parameter, moment)
            if value is not None:
                found[f"{moment}.{name}"] = value.detach().float().cpu().clone()
        if parameter.dtype != torch.float32:
            found[f"{MASTER}.{name}"] = safe_get_full_fp32_param(parameter).detach().float().cpu().clone()
    return found


def plain_optimizer(engine: Any) -> torch.optim.Optimizer:
    """torch's AdamW, below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def restore_moments(engine: Any, stage: int, moments: dict[str, Tensor], steps: int) -> None:
    """Put back what `full_moments` took, and the number of optimizer steps done."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if not moments:
        return
    optimizer = plain_optimizer(engine)
    if stage == 0:
        for name, parameter in engine.module.model.named_parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(steps)),
                **{moment: moments[f"{moment}.{name}"].to(parameter.device, torch.float32) for moment in MOMENTS},
            }
        return
    for name, parameter in engine.module.model.named_parameters():
        for moment in MOMENTS:
            safe_set_full_optimizer_state(parameter, moments[f"{moment}.{name}"].to(parameter.device), moment)
        if f"{MASTER}.{name}" in moments:
            safe_set_full_fp32_param(parameter, moments[f"{MASTER}.{name}"].to(parameter.device))
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(steps))
