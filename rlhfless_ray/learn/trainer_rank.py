"""One rank that trains a model: a DeepSpeed engine that accumulates gradients until a step."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.deepspeed_setup import deepspeed_engine, restore_linear, skipped_step
from rlhfless_ray.learn.deterministic import use_deterministic_kernels
from rlhfless_ray.learn.gradient_pieces import use_gradient_pieces
from rlhfless_ray.learn.lora import LoraAdapters
from rlhfless_ray.learn.micro_batch_tensors import TensorsOf, padded, passed
from rlhfless_ray.learn.micro_batches import MicroBatch
from rlhfless_ray.learn.offload import HostBuffers, leave_device, return_to_device
from rlhfless_ray.learn.optimizer_state import held_moments, held_weights, link_moments, plain_optimizer, restore_moments
from rlhfless_ray.learn.policy_model import check_head, in_wanted_dtype
from rlhfless_ray.learn.process_group import join_process_group, leave_process_group
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.learn.rank_state import Former, former_rank, load_weights, write_state
from rlhfless_ray.learn.rank_weights import RankWeights
from rlhfless_ray.learn.schedule import rate
from rlhfless_ray.learn.sequence_parallel import SequenceParallel
from rlhfless_ray.learn.tensor_parallel import ModelSlices, visible_adapters
from rlhfless_ray.learn.tied_ends import TiedEnds
from rlhfless_ray.learn.trainer import FIRST, OptimizerStep
from rlhfless_ray.local.laptop.cpu_bfloat16 import use_float32_products
from rlhfless_ray.local.process_memory import LARGE_PARAMETERS, release_free_heap
from rlhfless_ray.types import Span
from rlhfless_ray.weights.layout import whole_layers
from rlhfless_ray.weights.model_folder import AVERAGE, split_files
from rlhfless_ray.weights.saved_names import saved_state
from rlhfless_ray.weights.shards import shard_name
from rlhfless_ray.weights.tensor_file import Files, as_tensor
from rlhfless_ray.weights.tensor_slice import HeldSlices, Slices, TensorSlice

T = TypeVar("T")


class TrainerRank:
    """DeepSpeed's backend of `Trainer`. Call `open`, then `accumulate` and `update`, then `weights` or `state_files`."""

    def __init__(self, settings: RankSettings) -> None:
        if settings.deterministic:
            use_deterministic_kernels()
        self.settings, self.section = settings, settings.learner
        self.dtype, self.rank = settings.policy.dtype, settings.rank
        self.device = torch.device("cuda" if settings.device == "gpu" else "cpu")
        use_float32_products(self.dtype, self.device.type)
        self.ranks, self.stage, self.hosted = self.section.ranks, self.section.zero_stage, self.section.offloads_optimizer
        self.replicas = self.ranks // self.section.tensor_parallel  # copies of the model, whose gradients are averaged
        self.shares = self.replicas // self.section.sequence_parallel  # parts of a batch; ranks with the same part return the same values
        self.sequences: SequenceParallel | None = None  # this rank's place among those that share sequences
        self.slices: ModelSlices | None = None  # this rank's slice of each tensor, if several ranks share a copy
        self.optimizer_steps = 0
        self.engine: Any = None
        self.held: RankWeights  # of the model that `open` has built
        self.lora: LoraAdapters | None = None
        self.average: dict[str, Tensor] = {}  # on the host: moving average in float32 of the rank's layers, if one is kept
        self.is_large = False  # whether memory is released after each step
        self.linked = False  # whether ZeRO 1 and 2 know the moments of all parameters
        self.tensors_of: TensorsOf = padded  # makes the tensors of a micro-batch
        self.is_parked = False  # whether the state is parked in the GPU's host memory
        self.host_buffers = HostBuffers() if self.device.type == "cuda" else None  # for it
        self.parked_state: dict[str, Any] = {}  # `_state` while parked, if it needs collectives on the devices

    # ---- life -------------------------------------------------------------------------------------------------

    def open(self, wrapped: nn.Module, state: dict[str, Any] | None, task: str | None = None) -> None:
        """Build the engine, and add adapters if only these are trained. Call `join_process_group` before.

        Args:
            wrapped: module whose `model` is trained and published.
            state: see `read_state`; None: the model's own weights.
            task: peft's task type of the adapters.

        Raises:
            ValueError: `state` is of another model.
        """
        model: Any = wrapped.model
        section, seed = self.settings.lora, self.settings.seed % 2**63
        with in_wanted_dtype(model):  # new adapters get the dtype of their layer
            self.lora = LoraAdapters(model, section, seed, task) if section.rank else None
        weights = None if state is None else load_weights(model, state["weights"], adapters=self.lora is not None, divided=self.stage == 3)
        self.is_large = self.device.type == "cpu" and sum(p.numel() for p in model.parameters()) >= LARGE_PARAMETERS
        model.train()
        if self.section.recomputes_activations:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._build_engine(wrapped, weights)
        self.held = RankWeights(self.settings, self.engine, self.lora, self.slices, self.is_large)
        if self.settings.ema_beta is not None:
            self._average(HeldSlices(()) if state is None else state["average"])
        if state is not None:
            self.optimizer_steps = int(state["optimizer_steps"])
            restore_moments(self.engine, self.stage, state["moments"], self.optimizer_steps, self.slices)
            torch.set_rng_state(state["rng"])

    def _build_engine(self, wrapped: nn.Module, weights: HeldSlices | None) -> None:
        """Build DeepSpeed's engine. `weights`: of a checkpoint, at ZeRO 3."""
        model: Any = wrapped.model
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        is_divided = self.section.tensor_parallel > 1
        if is_divided:
            wrapped.config = model.config  # where DeepSpeed looks for the number of heads
        elif self.stage < 3:
            wrapped = wrapped.to(self.device)
        with visible_adapters() if is_divided and self.lora is not None else nullcontext():
            self.engine = deepspeed_engine(wrapped, self.section, self.dtype, self.device, self.rate(), weights)
        if is_divided:
            self.slices = ModelSlices(shapes, model.state_dict().items(), self.device)
            if self.lora is not None:
                self.lora.divide_dropout(self.slices.cuts)
        if self.stage == 0:
            self.engine.enable_backward_allreduce = False  # `step` reduces, so that it can check gradients before it steps
        elif self.stage < 3:
            use_gradient_pieces(self.engine.optimizer)
        if self.is_large and self.stage < 3 and self.lora is None and not is_divided:
            TiedEnds.install(model, before_gradient=release_free_heap)

    def join_process_group(self, rendezvous: tuple[str, int] | None) -> None:
        """Connect the ranks. `rendezvous`: address and port of rank 0; None: torch.distributed is initialized already."""
        join_process_group(rendezvous, self.rank, self.ranks, self.device.type)
        if (size := self.section.sequence_parallel) > 1:
            self.sequences = SequenceParallel(size, self.rank, self.ranks)

    def slice_sequences(self, wrapped: object) -> Any:
        """Return `wrapped`, changed so that ranks share its sequences if the settings say so. Call `join_process_group` before."""
        if self.sequences is not None:
            self.sequences.install(wrapped)
        return wrapped

    # ---- the step ---------------------------------------------------------------------------------------------

    def dropping(self, batch: Batch, sequences: np.ndarray, numbers: np.ndarray | None = None) -> AbstractContextManager[None]:
        """Apply dropout to the passes of a step inside the block, see `LoraAdapters.dropping`."""
        if self.lora is None or not self.drops:
            return nullcontext()
        return self.lora.dropping(batch, sequences, [self.settings.seed % 2**63, self.optimizer_steps], numbers)

    @property
    def drops(self) -> bool:
        """Whether a step's passes use dropout, so that they differ from those of the sampling policy."""
        return self.settings.lora.dropout > 0

    def passes(
        self, forward: Callable[[dict[str, Tensor]], Tensor], batch: Batch, cuts: Sequence[MicroBatch], tensors_of: TensorsOf | None = None
    ) -> Tensor:
        """Return the value of `forward` for each response token of these micro-batches, see `passed`."""
        return passed(forward, batch, cuts, self.device, tensors_of or self.tensors_of)

    def accumulate(
        self,
        batch: Batch,
        cuts: Sequence[MicroBatch],
        loss_of: Callable[[dict[str, Tensor], MicroBatch], Tensor],
        *,
        numbers: np.ndarray | None = None,
        first: MicroBatch = FIRST,
        tensors_of: TensorsOf | None = None,
        learns: bool = True,
    ) -> None:
        """Add the gradients of micro-batches. Each is a part of the whole step's loss, and the parts of all ranks add up.

        Args:
            batch, cuts: the rank's micro-batches of a batch. A rank without work has empty ones: it still joins the collectives, with
                the rows of `first` at weight 0.
            loss_of: (tensors, micro-batch) → loss, called once for each.
            numbers: see `LoraAdapters.dropping`.
            tensors_of: makes a micro-batch's tensors, if not the rank's own.
            learns: False: compute the losses without gradients.
        """
        for cut in cuts:
            rows = cut or first
            tensors = (tensors_of or self.tensors_of)(batch, rows, self.device)
            with self.dropping(batch, np.concatenate(rows), numbers) if learns else torch.no_grad():
                loss = loss_of(tensors, cut)
                if learns:
                    self.backward(loss if cut else loss * 0.0)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a part of the whole step's loss; the parts of all ranks add up."""
        self.engine.backward(loss * self.replicas, scale_wrt_gas=False)  # DeepSpeed averages gradients over them

    @contextmanager
    def checking_head(self, model: Any, *, maps: bool) -> Iterator[None]:
        """Call `check_head`, before the block, or after it for a model that `open` divides there (ZeRO 3, see `load_model` for `maps`).

        With shared sequences only tested families run.
        """
        if not maps:
            check_head(model)
        yield
        if maps and self.sequences is None:
            self.computed(lambda: check_head(model))

    def computed(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, a forward pass of parts of the model. ZeRO 3 gathers each layer while it computes."""
        module = self.engine.module
        module.forward = work
        try:
            return self.engine()
        finally:
            del module.forward

    def over_ranks(self, x: Tensor, largest: bool = False) -> Tensor:
        """Return the sum over the ranks that share a batch (or the maximum of each element), on the host.

        With tensor parallelism these are all ranks before `open`, and later one of each copy of the model.
        """
        divided = self.slices or self.sequences
        if self.ranks == 1 or (divided is not None and self.shares == 1):
            return x.cpu()
        import torch.distributed as dist

        x = x.to(self.device)
        group = None if divided is None else divided.data_group
        dist.all_reduce(x, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        return x.cpu()

    def rate(self) -> float:
        """Return the learning rate of the next optimizer step."""
        section, done = self.section, self.optimizer_steps
        if section.schedule == "constant":
            return section.learning_rate * min(1.0, (done + 1) / max(1, section.warmup_steps))
        return rate(
            section.schedule, done, self.settings.optimizer_steps, section.learning_rate, section.warmup_share, section.min_rate_share
        )

    def update(self, loss_is_finite: bool) -> OptimizerStep:
        """Clip the accumulated gradients and make an optimizer step, unless loss or gradient is not finite."""
        learning_rate = self.rate()
        for group in plain_optimizer(self.engine).param_groups:
            group["lr"] = learning_rate
        if self.stage == 0:
            if self.ranks > 1:
                self.engine.buffered_allreduce_fallback()
            norm = self._clip()
            applied = loss_is_finite and math.isfinite(norm)
            if applied:
                self.engine.step()
            else:
                self.engine.zero_grad()
        else:  # DeepSpeed's ZeRO optimizers clip, and skip the step if the norm is not finite
            zero = self.engine.optimizer
            with nullcontext() if loss_is_finite else skipped_step(zero), self._threads():
                self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
            applied = bool(self.engine.was_step_applied())
        if self.is_large:
            release_free_heap()  # engines may need the memory of activations and buffers until the next update
        if applied:
            self.optimizer_steps += 1
            if self.settings.ema_beta is not None:
                self._average()
            if self.stage in (1, 2) and not self.linked:
                link_moments(self.engine)
                self.linked = True
        skipped = "" if applied else f"the gradient norm is {norm}" if loss_is_finite else "the loss is not finite"
        return OptimizerStep(norm, learning_rate, self.rate(), skipped)

    def _clip(self) -> float:
        """Clip the gradients at stage 0, and return their norm before clipping."""
        most = self.section.grad_clip or math.inf
        if self.slices is None:
            return float(torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), most))
        norm = self.slices.norm(self.engine.module.model.named_parameters())
        torch.nn.utils.clip_grads_with_norm_(self.engine.module.parameters(), most, torch.tensor(norm))
        return norm

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Use this rank's share of the host's cores inside the block: a rank with a GPU has one thread, too few for an update there."""
        before = torch.get_num_threads()
        if self.hosted and self.device.type == "cuda":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.ranks))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _average(self, start: HeldSlices | None = None) -> None:
        """Update the weights' moving average. With `start`, begin with that average, and with the weights that it lacks."""
        assert self.settings.ema_beta is not None
        for name, tensor in self.held.own_layers():
            if start is not None:
                first = as_tensor(start[name]) if name in start else tensor
                self.average[name] = torch.empty(tensor.shape, dtype=torch.float32).copy_(first)
            else:  # Polyak & Juditsky 1992; in float32, because bfloat16 would round small changes away
                self.average[name].lerp_(tensor.float(), 1 - self.settings.ema_beta)

    # ---- weights and state ------------------------------------------------------------------------------------

    def weights(self, place: int | None = None, count: int | None = None) -> Slices:
        """Return this rank's slices of the weights that engines get, see `RankWeights.published`. Every rank must call it."""
        return self.held.published(place, count)

    def model_files(self, *, trained: bool = False) -> Files:
        """Return this rank's safetensors files of a Hugging Face folder. The files of all ranks together are the model.

        Every rank must call it. The files are views of the live state if the host has it. Files of several ranks lack their index.

        Args:
            trained: return only what is trained: adapters (from rank 0), or the weights' moving average if there is one. Needs no
                device. Otherwise the current weights are returned, adapters merged.
        """
        if not trained:
            weights = self.held.merged(whole_layers(self.held.sizes(), self.ranks))
        elif self.lora is not None:
            weights = self._state()["weights"]
            return {} if self.rank else self.lora.files(weights)
        elif self.settings.ema_beta is not None:
            weights = saved_state(self.engine.module.model, self.average)
        else:
            weights = saved_state(self.engine.module.model, self._state()["weights"])
        return split_files(weights, rank=self.rank, ranks=self.ranks) if weights else {}

    def _state(self, *, gathers: bool = True) -> dict[str, Any]:
        """Return this rank's part of a checkpoint. The parts of all ranks together are complete.

        Tensors are views of the live state if it is on the host. If adapters are trained, the weights are the adapters', from rank 0:
        the base is in the run's initial files. `gathers`: False: leave out the weights of a model.
        """
        if self.parked_state:
            return self.parked_state
        adapters = self.lora is not None
        return {
            "weights": self.held.trained() if adapters else dict(self.held.own_layers()) if gathers else {},
            "moments": held_moments(self.engine, self.stage, self.slices),
            "average": self.average,
            "optimizer_steps": self.optimizer_steps,
            "rng": torch.get_rng_state(),
        }

    def state_files(self) -> Files:
        """Return this rank's files of a checkpoint. `read_state` reads those of all ranks, also for another number of ranks.

        They are views of the live state, so an update changes their content within this process. Needs no device.
        """
        divided = self.stage == 3 and self.lora is None  # nothing is gathered
        state = self._state(gathers=not divided)
        return write_state(state, self.rank, self.ranks, self.lora, held_weights(self.engine, self.stage) if divided else None)

    # ---- between updates --------------------------------------------------------------------------------------

    def close(self) -> Former:
        """End the engine and leave the process group, so that the process can be a rank of another layout.

        Returns what this rank held. On the host it keeps tensors that all ranks hold, of which its own files have a part or nothing.
        """
        keeps = self.slices is None and self.device.type == "cpu"
        average = {TensorSlice.whole(name, tensor.shape): tensor for name, tensor in self.average.items()}
        held = {
            "model": (held_weights(self.engine, self.stage, self.slices), keeps and self.stage < 3),
            "optimizer": (held_moments(self.engine, self.stage, self.slices, shares_out=False), keeps and self.stage == 0),
            AVERAGE: (average, False),
        }
        former = {stem: former_rank(slices, shard_name(stem, self.rank, self.ranks), is_kept) for stem, (slices, is_kept) in held.items()}
        self.engine.destroy()
        del self.held
        self.engine = self.lora = self.slices = self.sequences = None
        gc.collect()  # the engine is in cycles
        leave_process_group()
        restore_linear()
        return former

    def leave_device(self) -> list[Span]:
        """Move all state to the host.

        Parts of a tensor that several ranks hold can be gathered on their devices only, so the state for a checkpoint before the next
        update is gathered now.
        """
        if self.is_parked:
            return []
        start = time.time()
        if self.stage == 3 or self.slices is not None:
            self.parked_state = self._state()
        leave_device(self.engine, self.stage, self.hosted, self.host_buffers)
        self.is_parked = True
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [Span("transfer", "leave device", start, time.time())]

    def return_to_device(self) -> list[Span]:
        if not self.is_parked:
            return []
        start = time.time()
        return_to_device(self.engine, self.stage, self.device, self.hosted)
        self.is_parked, self.parked_state = False, {}
        return [Span("transfer", "return to device", start, time.time())]
