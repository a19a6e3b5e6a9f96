"""DeepSpeed's configuration for a rank that trains, the optimizer's parameter groups, and how ZeRO 3 takes parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.optimizer_state import plain_optimizer
from rlhfless_ray.learn.policy_model import WANTED_DTYPE
from rlhfless_ray.learn.tensor_parallel import deepspeed_section
from rlhfless_ray.local.process_memory import release_free_heap, release_pages
from rlhfless_ray.weights.layout import padded_share
from rlhfless_ray.weights.tensor_file import as_tensor
from rlhfless_ray.weights.tensor_slice import HeldSlices, TensorSlice

if TYPE_CHECKING:
    from rlhfless_ray.recipe import LearnerConfig

BUCKET_ELEMENTS = 50_000_000  # gradients that are reduced at once: DeepSpeed's default takes 4 GB of buffers for a model of 0.5 B
UNDECAYED = ("bias", "layernorm.weight", "layer_norm.weight", "norm.weight", "ln_f.weight")  # parts of names, as in OpenRLHF


def _not_compiled(function: object = None, **_: object) -> Any:
    return function or (lambda decorated: decorated)


def import_muon() -> None:
    """Import DeepSpeed's Muon without compiling its kernels. ZeRO asks whether it is the optimizer, which it never is here.

    Importing what compiles takes 1.1 CPU seconds and 46 MB in each rank.
    """
    with patch.object(torch, "compile", _not_compiled), suppress(ImportError):  # versions before it have none
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


def deepspeed_config(section: LearnerConfig, dtype: str, device: str) -> JsonObject:
    """Return the configuration. `dtype`: of the weights. `device`: "cpu" or "cuda"."""
    parallel, stage = section.tensor_parallel, section.zero_stage
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,  # the number of micro-batches is open: we call step()
        "gradient_clipping": section.grad_clip if stage else 0.0,  # stage 0: see `TrainerRank._clip`
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's CPU Adam is compiled at first use (two minutes); torch's fused AdamW makes the same update as quickly (20 M weights)
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            # accumulate gradients of bfloat16 weights in float32, which DeepSpeed's stage 1 does in another optimizer class only:
            # otherwise first moments of a step from 96 micro-batches were 1.4 % off those from one, with float32 0.6 %
            "stage": 2 if stage == 1 and dtype == "bfloat16" else stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "offload_optimizer": {"device": "cpu" if section.offloads_optimizer else "none", "pin_memory": device == "cuda"},
        },
        "steps_per_print": 10**9,
        **({"tensor_parallel": deepspeed_section(parallel)} if parallel > 1 else {}),
    }


def parameter_groups(model: nn.Module, decay_all: bool) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: trained parameters with weight decay, and those without."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    # by their class too: GPT-2 calls norms `ln_1`, Falcon `ln_attn`
    norms = {id(p) for module in model.modules() if "norm" in type(module).__name__.lower() for p in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        spared = not decay_all and (id(parameter) in norms or any(part in name for part in UNDECAYED))
        if parameter.requires_grad:
            (others if spared else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def deepspeed_engine(
    wrapped: nn.Module, section: LearnerConfig, dtype: str, device: torch.device, learning_rate: float, weights: HeldSlices | None
) -> Any:
    """Build DeepSpeed's engine of a module, whose optimizer has made no step yet.

    Args:
        wrapped: has the trained model as `model`.
        dtype: of the weights.
        weights: of a checkpoint, at ZeRO 3; None: the module's own.
    """
    import deepspeed

    import_muon()
    model: Any = wrapped.model
    optimizer = torch.optim.AdamW(
        parameter_groups(model, section.decay_all),
        lr=learning_rate,
        betas=section.betas,
        eps=section.adam_eps,
        weight_decay=section.weight_decay,
        fused=True,
    )
    config = deepspeed_config(section, dtype, device.type)
    if section.zero_stage == 3:  # one parameter after the other, so that neither host nor device ever holds the whole model
        for buffer in wrapped.buffers():
            buffer.data = buffer.data.to(device)
        os.environ["LOCAL_RANK"] = "0"  # each rank sees one device
        divide_parameters(wrapped, device, config, weights)
        release_free_heap()  # the copies leave holes between the parts that are kept
    engine, *_ = deepspeed.initialize(model=wrapped, optimizer=optimizer, config=config)
    # ZeRO creates the optimizer's state by a trial step on zero gradients, whose count would distort Adam's bias correction
    for state in plain_optimizer(engine).state.values():
        if torch.is_tensor(state.get("step")):
            state["step"].zero_()
    return engine


def restore_linear() -> None:
    """Undo ZeRO 3's replacement of torch's linear function, which DeepSpeed leaves in the process.

    In another stage a process with it would reduce gradients in another order than one without it, and add up unlike ones.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Replaced

    if hasattr(Replaced, "linear_bk"):
        torch.nn.functional.linear = Replaced.linear_bk


@contextmanager
def skipped_step(optimizer: Any) -> Iterator[None]:
    """Make ZeRO skip its step inside the block, and drop the gradients, as it does with gradients that are not finite."""

    def skip(has_overflow: bool) -> None:
        optimizer.overflow = True  # which `step` reads after this call

    optimizer._update_scale = skip
    try:
        yield
    finally:
        del optimizer._update_scale


class OwnParts(nn.Module):
    """A module whose weights may be views of a mapped file, for `divide_parameters`. Only this rank's part of each is read.

    Each parameter gets memory of its own just before it is divided, into which the rank's part is copied, and converted. All take turns in
    one buffer, whose other pages are never touched: freed blocks would raise the size from which malloc maps blocks, and what DeepSpeed
    frees later would stay on the heap.
    """

    def __init__(self, module: Any, device: torch.device, weights: HeldSlices | None) -> None:
        super().__init__()
        self.module, self.device, self.weights = module, device, weights

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        names = {parameter: name for name, parameter in self.module.model.named_parameters()}
        wanted = {p: getattr(p, WANTED_DTYPE, p.dtype) for p in self.module.parameters(recurse)}
        buffer = torch.empty(
            max((p.numel() * dtype.itemsize for p, dtype in wanted.items()), default=0), dtype=torch.uint8, device=self.device
        )
        for parameter, dtype in wanted.items():
            mapped, own = parameter.data, padded_share(parameter.numel(), ranks, rank)
            whole = buffer[: mapped.numel() * dtype.itemsize].view(dtype)
            if self.weights is None:
                values = mapped.reshape(-1)[slice(*own)]
            else:
                values = as_tensor(self.weights.read(TensorSlice(names[parameter], tuple(mapped.shape), *own)).reshape(-1))
            whole[slice(*own)].copy_(values)
            parameter.data = whole.view(mapped.shape)
            release_pages(mapped.data_ptr(), mapped.nbytes)
            yield parameter


def divide_parameters(module: torch.nn.Module, device: torch.device, config: JsonObject, weights: HeldSlices | None) -> None:
    """Let DeepSpeed keep this rank's part of every parameter (ZeRO 3).

    Nothing is sent: DeepSpeed would broadcast the first rank's values, so that this rank needs all of them.

    Args:
        module: has the trained model as `model`.
        weights: of a checkpoint, by the model's names; None: the module's own.
    """
    import deepspeed

    class Init(deepspeed.zero.Init):
        def _zero_init_param(self, param: Any) -> None:
            self._convert_to_deepspeed_param(param)
            param.partition()

    Init(module=OwnParts(module, device, weights), config_dict_or_path=config)
