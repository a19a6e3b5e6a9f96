"""Seconds of a model function call in a layout, from the roofline: generation, a forward pass, an update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from placement.layouts import Layout
from placement.speed.roofline import Device, Model, all_reduce_s, decode_step_s, kv_capacity


@dataclass(frozen=True)
class CallWork:
    """What the calls of a step work on.

    sequences: of the batch. prompt_tokens, response_tokens: of each, on average. longest: tokens of the longest sequence. updates:
    optimizer steps on the batch.
    """

    sequences: int
    prompt_tokens: float
    response_tokens: float
    longest: int
    updates: int = 1

    @property
    def tokens(self) -> float:
        return self.sequences * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True)
class CallSeconds:
    """Seconds of calls on devices of one kind. `phases`: the catalog's figures (`placement/catalog/data/phases.yaml`)."""

    device: Device
    devices_per_node: int
    phases: Mapping[str, float]

    def generate_s(self, model: Model, work: CallWork, layout: Layout) -> float:
        """Return the seconds of a rollout whose responses all have the mean length, on engines that hold the weights.

        Raises ValueError if the weights do not fit an engine.
        """
        each = math.ceil(work.sequences / layout.data)
        holds = kv_capacity(model, self.device, layout.tensor, self.phases["engine_memory"])
        at_once = max(1, min(each, int(holds // max(1.0, work.prompt_tokens + work.response_tokens))))
        context = at_once * (work.prompt_tokens + work.response_tokens / 2)
        decode = work.response_tokens * decode_step_s(model, self.device, layout.tensor, at_once, context)
        prefill = self._computed_s(model, 1.0, work.sequences * work.prompt_tokens, layout, 0, self.phases["forward_efficiency"])
        return math.ceil(each / at_once) * decode + prefill

    def sync_s(self, model: Model) -> float:
        """Return the seconds until engines have new weights."""
        return self.phases.get("weight_sync_s", 0.0) + model.weight_bytes / self.device.reshard_bytes_per_s

    def reshard_s(self, model: Model) -> float:
        """Return the seconds to move a model's weights into another layout of its ranks."""
        return model.weight_bytes / self.device.reshard_bytes_per_s

    def park_s(self, device_bytes: float) -> float:
        """Return the seconds to move so many bytes of each device to host memory, or back."""
        return device_bytes / self.device.host_bytes_per_s

    def infer_s(self, model: Model, work: CallWork, layout: Layout, micro_batch_tokens: int) -> float:
        """Return the seconds of a forward pass over the batch: log-probabilities, values or rewards."""
        batches = math.ceil(work.tokens / layout.data / micro_batch_tokens)
        computed = self._computed_s(model, 1.0, work.tokens, layout, batches, self.phases["forward_efficiency"])
        return max(computed, (batches if layout.zero_stage == 3 else 0) * self._gather_s(model, layout))

    def train_s(self, model: Model, work: CallWork, layout: Layout, micro_batch_tokens: int) -> float:
        """Return the seconds of all optimizer steps on the batch.

        Forward and backward have 3 x the FLOPs of a forward pass. Gradients are reduced once per update at stages 0 and 1, and once per
        micro-batch above. Stage 3 also gathers the weights twice per micro-batch. Transfers overlap with computing.
        """
        tokens = work.tokens / work.updates
        batches = math.ceil(tokens / layout.data / micro_batch_tokens)
        computed = self._computed_s(model, 3.0, tokens, layout, batches, self.phases["training_efficiency"])
        gathers = 3 * batches if layout.zero_stage == 3 else batches if layout.zero_stage == 2 else 1
        gathered = 0.0 if layout.zero_stage == 3 else self._gather_s(model, layout)  # the new weights
        share = layout.tensor * (layout.data if layout.zero_stage else 1)
        optimizer = self.phases["optimizer_bytes_per_parameter"] * model.parameters / share / self.device.memory_bytes_per_s
        return work.updates * (max(computed, gathers * self._gather_s(model, layout)) + gathered + optimizer)

    def _computed_s(self, model: Model, work: float, tokens: float, layout: Layout, batches: int, efficiency: float) -> float:
        """Return the seconds of computing and of all-reduces of tensor parallelism.

        A micro-batch takes as long as `half_efficiency_tokens` more tokens on one device, however its matrices are divided.
        """
        rate = self.device.bf16_flops_per_s * efficiency * (self.phases.get("mixture_efficiency", 1.0) if model.experts else 1.0)
        copy = tokens / layout.data
        half = batches * self.phases.get("half_efficiency_tokens", 0.0)
        computed = work * model.flops_per_token * (copy / (layout.tensor * layout.sequence) + half) / layout.threads / rate
        reduces = 2 * model.layers * (2 if work > 1 else 1) * max(1, batches)  # of hidden states: two in a layer, and two of gradients
        each = copy / max(1, batches) * model.hidden_size * model.value_bytes
        return computed + reduces * all_reduce_s(self.device, layout.tensor, each)

    def _gather_s(self, model: Model, layout: Layout) -> float:
        """Return the seconds to gather sharded weights (or reduce gradients) once, over the slower of links and network."""
        if layout.data == 1:
            return 0.0
        own = (layout.data - 1) / layout.data * model.weight_bytes
        inside = own / layout.tensor / self.device.link_bytes_per_s
        return inside if layout.slots <= self.devices_per_node else max(inside, own / self.device.net_bytes_per_s)
