"""The learner's state between device and host memory: DeepSpeed's own way where it has one, for at ZeRO 1 to 3 parameters
are views into flat buffers, and moving the module would part the two."""

from __future__ import annotations

from typing import Any

import torch

from rlhfless_ray.learn.optimizer_state import link_moments, plain_optimizer

HOST = torch.device("cpu")


def leave_device(engine: Any, stage: int, hosted: bool = False) -> None:
    """Weights, gradients and optimizer state go to the host. Every rank may call it by itself. `hosted`: the optimizer's state and
    float32 weights are there all the time (`learner.optimizer_offload`)."""
    if stage == 0:
        engine.zero_grad()
        engine.module.to(HOST)
        _move_optimizer(engine, HOST)
        return
    if stage in (1, 2):
        engine.offload_states(pin_memory=False)
        if hosted:
            _move_scratch(engine, HOST)
    else:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        # DeepSpeed moves the float32 parts and the moments of its own Adam only, ours is torch's; and weights only where all are
        # trained
        engine.offload_states(include=[State.lp_grads, State.contiguous_grad_buffer], pin_memory=False)
        _move_parts(engine, HOST, hosted)
    _move_frozen(engine, HOST)


def return_to_device(engine: Any, stage: int, device: torch.device, hosted: bool = False) -> None:
    """The reverse of `leave_device`."""
    if stage == 0:
        engine.module.to(device)
        _move_optimizer(engine, device)
        return
    if stage == 3:
        _move_parts(engine, device, hosted)
    engine.reload_states()
    if stage in (1, 2):
        link_moments(engine)  # DeepSpeed links the weights again, but not their moments
        if hosted:
            _move_scratch(engine, device)
    _move_frozen(engine, device)


def _move_parts(engine: Any, device: torch.device, hosted: bool) -> None:
    """This rank's parts of what is trained: the flat buffer that the parameters' own parts are views of, and unless they are
    `hosted` the float32 weights and their moments."""
    zero = engine.optimizer
    if not hosted:
        for part in zero.fp32_partitioned_groups_flat:
            part.data = part.data.to(device)
        _move_optimizer(engine, device)
    flat = zero.lp_param_buffer
    flat.data = flat.data.to(device)
    offset = 0
    for part in zero._get_parameter_partitions():
        part.data = flat.narrow(0, offset, part.numel())
        offset += part.numel()
    zero.fp16_partitioned_groups_flat.clear()
    zero._set_fp16_partitioned_groups_flat()


def _move_scratch(engine: Any, device: torch.device) -> None:
    """Where ZeRO 1 and 2 add up a parameter's gradients on their way to the host: as large as the largest parameter."""
    buffer = engine.optimizer.temp_grad_buffer_for_gpu_offload
    buffer.data = buffer.data.to(device)


def _move_frozen(engine: Any, device: torch.device) -> None:
    """What is not trained is in no buffer of ZeRO's; at stage 3 each rank has a part of it."""
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            held = getattr(parameter, "ds_tensor", parameter)
            held.data = held.data.to(device)


def _move_optimizer(engine: Any, device: torch.device) -> None:
    for state in plain_optimizer(engine).state.values():
        for name, value in state.items():
            if torch.is_tensor(value):
                state[name] = value.to(device)
