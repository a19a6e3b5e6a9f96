"""Layouts: how the ranks of a call, or the engines of a rollout, share a model and its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from placement.calls import Kind
from placement.memory import Training, engine_widths, kv_bytes, rank_memory
from placement.peak_memory import CUDA_BYTES, MicroBatch, layer_bytes, logits_bytes, trainer_parts

MICRO_BATCHES = (16384, 8192, 4096, 2048, 1024, 512)  # tokens, the fastest first
FEW_NODES = 16  # up to here a call may have any number of nodes


@dataclass(frozen=True)
class Layout:
    """Ranks of a call, by what they share.

    A rollout has `data` engines of `tensor` slots. Tensor parallelism and sequence parallelism stay inside a node.

    Parameters
    ----------
    data : int
        Copies of the model, each with its share of the batch. With ZeRO they share the model's state.
    tensor, sequence : int
        Ranks that share each matrix, and ranks that share each sequence.
    zero_stage : int
        What the copies share of the state (ZeRO, arXiv 1910.02054).
    offload : bool
        Whether gradients and the optimizer's state stay in host memory.
    threads : int
        Slots of a rank: threads on CPU, 1 on GPU.
    """

    data: int = 1
    tensor: int = 1
    sequence: int = 1
    zero_stage: int = 0
    offload: bool = False
    threads: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.sequence

    @property
    def slots(self) -> int:
        return self.ranks * self.threads

    def __str__(self) -> str:
        counts = {"data": self.data, "tensor": self.tensor, "sequence": self.sequence}
        shared = " × ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
        rest = [f"{shared} parallel"] * bool(shared) + [f"ZeRO {self.zero_stage}"] * (self.zero_stage > 0) + ["offloaded"] * self.offload
        rest += [f"{self.threads} threads a rank"] * (self.threads > 1)
        return f"{self.slots} slot{'s' * (self.slots > 1)}" + f" ({', '.join(rest)})" * bool(rest)


@dataclass(frozen=True)
class Devices:
    """Devices that calls may have. `room_bytes`: memory of each, less what parked processes keep there."""

    nodes: int
    slots_per_node: int
    room_bytes: float

    @property
    def slots(self) -> int:
        return self.nodes * self.slots_per_node

    @property
    def counts(self) -> list[int]:
        """Numbers of slots of a call: powers of two inside a node, and whole nodes. Not every number of many nodes."""
        inside = [2**k for k in range(self.slots_per_node.bit_length()) if self.slots_per_node % 2**k == 0 and 2**k < self.slots_per_node]
        whole = [n for n in range(1, self.nodes + 1) if n <= FEW_NODES or n == self.nodes or n in (24, 32, 48, 64)]
        return inside + [n * self.slots_per_node for n in whole]


@dataclass(frozen=True)
class Fitting:
    """A layout that fits, with the largest micro-batch that does, and the bytes of a device at its peak."""

    layout: Layout
    micro_batch_tokens: int
    device_bytes: float


class NoLayout(ValueError):
    """Raised when a call has no layout within what the recipe and the devices allow."""


def layouts_of(
    kind: Kind, config: Mapping[str, Any], parameters: int, devices: Devices, longest: int, value_bytes: int = 2
) -> list[Fitting]:
    """Return the layouts in which a call fits the devices' memory, each with its largest micro-batch.

    Parameters
    ----------
    kind : Kind
        What the call does.
    config : mapping
        The Hugging Face configuration of the call's model.
    parameters : int
        Number of its parameters.
    devices : Devices
        The devices.
    longest : int
        Tokens of the longest sequence.
    value_bytes : int
        Bytes of a weight.

    Raises
    ------
    NoLayout
        If no layout fits. Its message names the layout that needs the least memory of each device.
    """
    widths = [w for w in engine_widths(config, devices.slots_per_node) or [1] if devices.slots_per_node % w == 0]
    found: list[Fitting] = []
    least: tuple[float, Layout] | None = None
    for slots, width in itertools.product(devices.counts, widths):
        if slots % width:
            continue
        copies = slots // width
        stages = [0] if kind is Kind.GENERATE else [0, 3] if kind is Kind.INFER else [1, 2, 3]
        for stage in stages if copies > 1 else stages[:1]:
            layout = Layout(copies, width, zero_stage=stage)
            for tokens in MICRO_BATCHES if kind is not Kind.GENERATE else (longest,):
                size = _device_bytes(kind, config, parameters, layout, max(tokens, longest), longest, value_bytes)
                if least is None or size < least[0]:
                    least = size, layout
                if size <= devices.room_bytes:
                    found.append(Fitting(layout, max(tokens, longest), size))
                    break
    if not found:
        assert least is not None
        nearest = f"the nearest is {least[1]} with {least[0] / 1e9:.1f} GB of each"
        raise NoLayout(f"no layout fits {devices.slots} devices with room for {devices.room_bytes / 1e9:.1f} GB each; {nearest}")
    return found


def _device_bytes(
    kind: Kind, config: Mapping[str, Any], parameters: int, layout: Layout, tokens: int, longest: int, value_bytes: int
) -> float:
    """Return the bytes of a device at the peak of a call."""
    if kind is Kind.GENERATE:
        return CUDA_BYTES + parameters * value_bytes / layout.tensor + kv_bytes(config, longest, value_bytes, layout.tensor)
    batch = MicroBatch(tokens, longest, tokens)
    training = Training(
        layout.ranks, layout.zero_stage, value_bytes, layout.offload, tensor_parallel=layout.tensor, sequence_parallel=layout.sequence
    )
    if kind is Kind.TRAIN:
        return sum(size for _, size in trainer_parts(config, parameters, training, batch, checkpointing=True, on_gpu=True))
    working = tokens * layer_bytes(config, longest, value_bytes) / layout.tensor + logits_bytes(config, tokens)
    return CUDA_BYTES + rank_memory(parameters, training).weights + working
