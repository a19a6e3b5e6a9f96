"""Read and restore each rank's part of weights and optimizer state, by parameter name, for every ZeRO stage.

The parts of all ranks together are the whole state. It can be read with another number of ranks or another stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhfless_ray.learn.tensor_parallel import ModelSlices
from rlhfless_ray.weights.layout import Interval, even_share, padded_share
from rlhfless_ray.weights.tensor_file import as_tensor
from rlhfless_ray.weights.tensor_slice import HeldSlices, TensorSlice

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"  # the float32 weights behind bfloat16 ones: most updates are smaller than a bfloat16 step


def parameter_sizes(engine: Any, stage: int, slices: ModelSlices | None = None) -> dict[str, int]:
    """Return {name: elements} of the model's state. Tensors sharded by ZeRO 3 or tensor parallelism count as whole."""
    module = engine.module.model
    if stage < 3:
        sizes = {name: tensor.numel() for name, tensor in module.state_dict().items()}
        return sizes if slices is None else {name: slices.elements(name, size) for name, size in sizes.items()}
    return {name: parameter.ds_numel for name, parameter in module.named_parameters()}


def whole_weights(engine: Any, stage: int, owner: Mapping[str, int], slices: ModelSlices | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, whole tensor on CPU) of the parameters that `owner` assigns to this rank.

    Every rank must read all of them at ZeRO 3 and with `slices`, where one parameter after the other is gathered.
    """
    import deepspeed

    module, rank = engine.module.model, torch.distributed.get_rank()
    if slices is not None:
        for name, tensor in module.state_dict().items():
            if name in owner and owner[name] // slices.width == rank // slices.width:  # its copy of the model gathers it
                whole = slices.gathered(name, tensor.detach())
                if owner[name] == rank:
                    yield name, whole.cpu()
    elif stage < 3:
        for name, tensor in module.state_dict().items():
            if owner.get(name) == rank:
                yield name, tensor.detach().cpu()
    else:
        for name, parameter in module.named_parameters():
            if name not in owner:
                continue
            with deepspeed.zero.GatheredParameters([parameter]):
                own = parameter.detach().cpu().clone() if owner[name] == rank else None
            if own is not None:
                yield name, own


def held_weights(engine: Any, stage: int, slices: ModelSlices | None = None) -> dict[TensorSlice, Tensor]:
    """Return this rank's slices of the weights: whole tensors, or its parts at ZeRO 3 and with tensor parallelism (`slices`).

    They are views of the live state where that holds them so.
    """
    if stage < 3:
        cuts = {} if slices is None else slices.cuts
        state = engine.module.model.state_dict().items()
        return {cuts.get(name, TensorSlice.whole(name, tensor.shape)): tensor.detach() for name, tensor in state}
    held = {}
    for name, parameter in engine.module.model.named_parameters():
        start, end = _own_share(parameter)
        held[TensorSlice(name, tuple(parameter.ds_shape), start, end)] = parameter.ds_tensor.detach()[: end - start].cpu()
    return held


def held_moments(engine: Any, stage: int, slices: ModelSlices | None = None, *, shares_out: bool = True) -> dict[TensorSlice, Tensor]:
    """Return this rank's slices, as flat float32 tensors on CPU, of "<moment>.<parameter name>" of what is trained.

    Moments are missing before the first step. A policy in bfloat16 has its float32 weights beside them, as
    "master.<parameter name>". At stage 0 every rank holds everything, and each returns an even share if it `shares_out`. Tensors are
    views of the live state if that is on the host. With `slices` the first rank of each copy returns tensors that all ranks hold.
    """
    moments = {}
    group = None if slices is None else slices.data_group
    stepped = bool(plain_optimizer(engine).state)  # DeepSpeed cannot be asked before the first step
    for name, parameter in _trained(engine):
        if shares_out and slices is not None and slices.rank and name not in slices.cuts:
            continue
        kinds = [*(MOMENTS if stepped else ()), *([MASTER] if parameter.dtype != torch.float32 else [])]
        for kind in kinds:
            start, part = _part(engine, stage, parameter, kind)
            if stage == 0 and shares_out:
                start, end = even_share(part.numel(), torch.distributed.get_world_size(group), torch.distributed.get_rank(group))
                part = part[start:end]
            if part.numel():
                moments[_slice_of(f"{kind}.{name}", parameter, slices).part(start, start + part.numel())] = part.detach().float().cpu()
    return moments


def _slice_of(name: str, parameter: Any, slices: ModelSlices | None) -> TensorSlice:
    """Return the slice of a parameter, or of a moment of it, that ranks of this copy of the model share out."""
    if slices is not None and (cut := slices.cuts.get(name.split(".", 1)[1])) is not None:
        return replace(cut, name=name)
    return TensorSlice.whole(name, getattr(parameter, "ds_shape", parameter.shape))


def _part(engine: Any, stage: int, parameter: Any, kind: str) -> tuple[int, Tensor]:
    """Return this rank's part of a moment or of a float32 weight: its first element, and a flat view of the live state."""
    if stage == 0:
        return 0, plain_optimizer(engine).state[parameter][kind].view(-1)
    key = None if kind == MASTER else kind
    if stage == 3:
        part, _ = engine.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)
        start, end = _own_share(parameter)
        return start, part.view(-1)[: end - start]
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:  # other ranks hold it
        return 0, torch.empty(0)
    return mapping.lp_fragment_address.start, mapping.get_hp_fragment(key).view(-1)


def _own_share(parameter: Any) -> Interval:
    """Return this rank's interval of a parameter at ZeRO 3. DeepSpeed pads the tensors that hold it to equal sizes."""
    group = parameter.ds_process_group
    return padded_share(parameter.ds_numel, torch.distributed.get_world_size(group), torch.distributed.get_rank(group))


def _trained(engine: Any) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in engine.module.model.named_parameters() if parameter.requires_grad)


def plain_optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return torch's AdamW from inside DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def link_moments(engine: Any) -> None:
    """Make ZeRO 1 and 2 find the moments of every parameter, also after they have moved.

    DeepSpeed does this in the step of the first parameter group, when the moments of the other groups do not exist yet.
    """
    if plain_optimizer(engine).state:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def restore_moments(engine: Any, stage: int, moments: HeldSlices, steps: int, slices: ModelSlices | None = None) -> None:
    """Restore this rank's part of the `held_moments` of all ranks, and the number of optimizer steps done."""
    optimizer = plain_optimizer(engine)
    stepped = any(key.startswith(MOMENTS) for key in moments)
    if stepped:  # DeepSpeed and torch make the state in the first step only
        groups = (group["params"] for group in optimizer.param_groups)
        for parameter in engine.optimizer.fp32_partitioned_groups_flat if stage == 3 else itertools.chain(*groups):
            optimizer.state[parameter] = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        if stage in (1, 2):
            engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in _trained(engine):
        kinds = [*(MOMENTS if stepped else ()), *([MASTER] if f"{MASTER}.{name}" in moments and stage else [])]
        for kind in kinds:
            start, part = _part(engine, stage, parameter, kind)
            wanted = _slice_of(f"{kind}.{name}", parameter, slices).part(start, start + part.numel())
            part.data.copy_(as_tensor(moments.read(wanted).reshape(-1)))
    for parameter, state in optimizer.state.items():
        state["step"] = torch.tensor(float(steps), device=parameter.device)  # a fused step reads it there
