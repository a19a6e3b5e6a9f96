"""Move the learner's state between device and host memory.

This uses DeepSpeed's own functions where they exist: with ZeRO 1 to 3 parameters are views into flat buffers, and moving the module
would separate the two.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from rlhfless_ray.learn.optimizer_state import link_moments, plain_optimizer

HOST = torch.device("cpu")
LEAST_LOCKED_BYTES = 2**20  # smaller tensors are copied to memory that is not page-locked


class HostBuffers:
    """Page-locked host memory for a state that leaves its device again and again, of exactly its size.

    torch's allocator would round each buffer up to a power of two, and keep it too.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, list[Tensor]] = {}  # by size in bytes
        self._taken: Counter[int] = Counter()

    @property
    def nbytes(self) -> int:
        return sum(size * len(same) for size, same in self._buffers.items())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let DeepSpeed take its page-locked buffers from here inside the block. Those of an earlier block are free again."""
        from deepspeed.accelerator import get_accelerator

        accelerator, self._taken = get_accelerator(), Counter()
        accelerator.pin_empty_like = self._like
        try:
            yield
        finally:
            del accelerator.pin_empty_like

    def _like(self, tensor: Tensor, device: str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        kind = tensor.dtype if dtype is None else dtype
        size = tensor.numel() * kind.itemsize
        if size < LEAST_LOCKED_BYTES:
            return torch.empty(tensor.shape, dtype=kind)
        same, number = self._buffers.setdefault(size, []), self._taken[size]
        if number == len(same):
            same.append(page_locked(size))
        self._taken[size] += 1
        return same[number].view(kind).view(tensor.shape)


def page_locked(size: int) -> Tensor:
    """Return page-locked host memory, (size,) uint8, which must not be freed.

    If CUDA refuses to lock it, copies to and from a device take longer.
    """
    memory = torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    if torch.cuda.is_initialized():
        refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)) != 0
        if refused:
            with suppress(RuntimeError):  # CUDA tells the error to the next kernel, too
                torch.zeros(1, device="cuda")
    return memory


def leave_device(engine: Any, stage: int, hosted: bool = False, buffers: HostBuffers | None = None) -> None:
    """Move weights, gradients and optimizer state to the host. It needs no collective, so a rank may call it alone.

    `hosted`: optimizer state and float32 weights are always on the host (`learner.optimizer_offload`). At stages 1 and 2 state can be
    read on the host as on the device. There it goes to `buffers`, if there are any, which are page-locked: a policy of 494 M parameters
    took 8 s to leave an H200 with memory that was not.
    """
    if stage == 0:
        engine.zero_grad()
        engine.module.to(HOST)
        _move_optimizer(engine, HOST)
        return
    if stage in (1, 2):
        with nullcontext() if buffers is None else buffers.lent():
            engine.offload_states(pin_memory=buffers is not None)
        engine.optimizer._link_all_hp_params()
        link_moments(engine)
        if hosted:
            _move_scratch(engine, HOST)
    else:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        # DeepSpeed moves float32 parts and moments of its own Adam only, not of torch's, and weights only if all of them are trained
        engine.offload_states(include=[State.lp_grads, State.contiguous_grad_buffer], pin_memory=False)
        _move_parts(engine, HOST, hosted)
    _move_frozen(engine, HOST)


def return_to_device(engine: Any, stage: int, device: torch.device, hosted: bool = False) -> None:
    """Move back to the device what `leave_device` moved to the host."""
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
    """Move this rank's parts of trained parameters.

    These are the flat buffer that the parameters are views of and, unless they are `hosted`, the float32 weights and their moments.
    """
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
    """Move the buffer in which ZeRO 1 and 2 add up gradients for the host. It has the size of the largest parameter."""
    buffer = engine.optimizer.temp_grad_buffer_for_gpu_offload
    buffer.data = buffer.data.to(device)


def _move_frozen(engine: Any, device: torch.device) -> None:
    """Move frozen parameters, which are in none of ZeRO's buffers. At stage 3 each rank has a part of them."""
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            held = getattr(parameter, "ds_tensor", parameter)
            held.data = held.data.to(device)


def _move_optimizer(engine: Any, device: torch.device) -> None:
    for state in plain_optimizer(engine).state.values():
        for name, value in state.items():
            if torch.is_tensor(value):
                state[name] = value.to(device)
