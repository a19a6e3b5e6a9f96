"""Seconds from a model's configuration and a device's data sheet: decoding, training, memory, transfers.

The roofline: an operation takes max(bytes / bandwidth, FLOPs / peak), divided by the efficiency that such operations
reach. Every function is pure. Devices and efficiencies come in as data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from placement.speed.decode_speed import Speed
from placement.speed.model_sizes import Model as Model

FEW_SEQUENCES = 4  # an engine that holds fewer of its longest sequences at once has almost no KV cache


@dataclass(frozen=True)
class Device:
    """One accelerator, in bytes, bytes/s and FLOP/s (dense bf16). Efficiencies are shares of the peak.

    `placement/catalog/data/devices.yaml` describes the fields.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flops_per_s: float
    decode_efficiency: float
    link_bytes_per_s: float
    reduce_latency_s: float
    net_bytes_per_s: float
    host_bytes_per_s: float
    reshard_bytes_per_s: float
    broadcast_bytes_per_s: float
    price_per_hour: float | None = None
    step_s: float = 0.0  # overhead of a decode step, on top of the roofline
    seq_s: float = 0.0  # overhead of each sequence in it
    spot_price_per_hour: float | None = None
    spot_preempt_per_hour: float = 0.0


def all_reduce_s(device: Device, width: int, size_bytes: float) -> float:
    """Return the seconds of an all-reduce of `size_bytes` over `width` devices of a node: latency and a ring's 2(w-1)/w passes."""
    if width == 1:
        return 0.0
    return device.reduce_latency_s + 2 * (width - 1) / width * size_bytes / device.link_bytes_per_s


def decode_step_s(model: Model, device: Device, width: int, running: float, context_tokens: float) -> float:
    """Return the seconds of one decode step on `width` devices.

    The step has `running` sequences that hold `context_tokens` tokens together. Tensor parallelism adds two all-reduces
    of the hidden state per layer (Megatron-LM, arXiv 1909.08053). KV heads that are fewer than the devices are copied.
    """
    kv = model.kv_bytes(width)
    moved = model.step_read_bytes(running) + running * model.activation_bytes_per_token + context_tokens * kv
    attention = 4.0 * context_tokens * model.layers * model.heads * model.head_size
    flops = running * model.flops_per_token + attention
    slower = max(moved / device.memory_bytes_per_s, flops / device.bf16_flops_per_s)
    reduced = 2 * model.layers * all_reduce_s(device, width, model.value_bytes * running * model.hidden_size)
    return device.step_s + running * device.seq_s + slower / width / device.decode_efficiency + reduced


def quantise_s(model: Model, device: Device, width: int, moved_bytes: float) -> float:
    """Return the seconds in which an engine quantises weights that it has loaded. moved_bytes: memory traffic of each parameter."""
    return model.quantised_parameters * moved_bytes / width / device.memory_bytes_per_s / device.decode_efficiency


def decode_speed(model: Model, device: Device, width: int = 1, batch: int = 64, context: float = 512.0) -> Speed:
    """Return the affine speed of an engine of `width` devices.

    It is exact at one sequence, at `batch` sequences, and in the context there: `context` tokens for each of them.
    Below the ridge (some 300-400 sequences) the roofline is affine itself.
    """
    one, empty = decode_step_s(model, device, width, 1, 0.0), decode_step_s(model, device, width, batch, 0.0)
    full = decode_step_s(model, device, width, batch, batch * context)
    per_seq = (empty - one) / (batch - 1) if batch > 1 else 0.0
    return Speed(one - per_seq, per_seq, max(0.0, full - empty) / (batch * context))


def check_width(model: Model, width: int) -> None:
    """Raise ValueError if an engine of `width` devices cannot share out the attention heads (vLLM refuses it too)."""
    if width < 1 or model.heads % width:
        fit = ", ".join(str(w) for w in range(1, model.heads + 1) if model.heads % w == 0)
        raise ValueError(f"`tensor_parallel`: {width} devices cannot share the {model.heads} heads of {model.name}; set it to one of {fit}")


def possible_widths(model: Model, most: int) -> list[int]:
    """Return the widths that are powers of two, can share the attention heads, and are at most `most` devices."""
    return [w for w in (2**k for k in range(max(0, most).bit_length())) if model.heads % w == 0]


def kv_capacity(model: Model, device: Device, width: int, memory_share: float) -> int:
    """Return the KV tokens that an engine of `width` devices holds if it may use `memory_share` of their memory.

    Raises ValueError if the weights do not fit.
    """
    room = width * memory_share * device.memory_bytes - model.engine_bytes
    tokens = int(room // (model.kv_bytes(width)))
    if tokens < 1:
        raise ValueError(
            f"{model.name} ({model.engine_bytes / 1e9:.0f} GB) does not fit {width} x {device.name} with {memory_share:.0%} of "
            f"{device.memory_bytes / 1e9:.0f} GB each: set a larger `tensor_parallel`"
        )
    return tokens


def low_kv_warning(model: Model, device: Device, width: int, memory_share: float, longest: float) -> str | None:
    """Return a sentence if engines of `width` devices hold fewer than FEW_SEQUENCES of the longest sequences (tokens) at once."""
    holds = kv_capacity(model, device, width, memory_share)
    if holds >= FEW_SEQUENCES * longest:
        return None
    return (
        f"warning: {model.name} leaves {width} x {device.name} room for {holds:,} KV tokens, {holds / longest:.1f} sequences of "
        f"{longest:,.0f}; most of an engine's responses will wait: take wider engines or devices with more memory"
    )


@dataclass(frozen=True)
class Sharding:
    """How often weights or gradients cross the links: per forward and training micro-batch, and per optimizer update.

    A fractional `per_forward` means that only one of several models is gathered.
    """

    name: str
    per_forward: float
    per_training: int
    per_update: int


@dataclass(frozen=True)
class TrainerModel:
    """Seconds of forward passes and training on devices that share the state of the trained models.

    The state is sharded as little as memory allows (ZeRO, arXiv 1910.02054):

    1. Weights and gradients whole on every device: a micro-batch needs no transfer.
    2. Weights whole, gradients reduced once per micro-batch.
    3. Everything sharded (ZeRO 3, FSDP): a forward pass gathers the weights. Training gathers them twice and reduces
    once.

    Transfers and computing overlap, so a micro-batch takes the longer of the two. Computing a micro-batch of t tokens a device
    reaches a share efficiency · t / (t + half_efficiency_tokens) of the dense bf16 peak: it takes as long as that many more tokens.

    models: number of models trained side by side; one frozen reference is held as well. hosted: the optimizer's state
    stays in host memory except during the update (VERL's `optimizer_offload`). That leaves room for whole weights, with
    the reference sharded where that is still too much. Each update then waits for the state, and weights are sharded
    meanwhile. mixture_efficiency: factor of both efficiencies for mixtures of experts, whose tokens are sent between
    devices in every layer.
    """

    model: Model
    device: Device
    devices_per_node: int
    models: int
    usable_memory: float
    training_efficiency: float
    forward_efficiency: float
    micro_batch_tokens: int
    least_batch_tokens: int
    optimizer_bytes_per_parameter: float
    hosted: bool = False
    half_efficiency_tokens: float = 0.0
    mixture_efficiency: float = 1.0

    def flops_per_s(self, efficiency: float) -> float:
        """Return the FLOP/s that one device reaches at most, at `efficiency` of its peak."""
        return self.device.bf16_flops_per_s * efficiency * (self.mixture_efficiency if self.model.experts else 1.0)

    def sharding(self, devices: int) -> Sharding:
        return self._least_sharded(devices)[0]

    def held_bytes(self, devices: int) -> float:
        """Return the bytes of state that each of `devices` devices holds."""
        return self._least_sharded(devices)[1]

    def _least_sharded(self, devices: int) -> tuple[Sharding, float]:
        n, k, room = self.model.parameters, self.models, self.usable_memory * self.device.memory_bytes
        optimizer = 0 if self.hosted else 12 * k
        everything = n * (16 * k + 2) / devices
        least = everything if self.hosted else 0.0  # at the update
        whole = n * (4 * k + 2 + optimizer / devices)
        if whole <= room:
            return Sharding("optimizer", 0, 0, 1), max(whole, least)
        weights = n * (2 * k + 2 + (2 * k + optimizer) / devices)
        if weights <= room:
            return Sharding("optimizer and gradients", 0, 1, 0), max(weights, least)
        trained = n * (2 * k + (2 * k + 2 + optimizer) / devices)
        if self.hosted and trained <= room:  # of the k + 1 models in a forward pass only the reference is gathered
            return Sharding("optimizer, gradients and reference", 1 / (k + 1), 1, 0), max(trained, least)
        return Sharding("all", 1, 3, 0), everything

    def forward_s(self, tokens: float, devices: int) -> float:
        """Return the seconds of one forward pass over `tokens` tokens (log-probabilities, values, rewards)."""
        return self._pass_s(tokens, devices, 1.0, self.sharding(devices).per_forward, self.forward_efficiency)

    def train_s(self, tokens: float, devices: int) -> float:
        """Return the seconds of forward and backward of one model over `tokens` tokens: 3 x the FLOPs of a forward pass."""
        return self._pass_s(tokens, devices, 3.0, self.sharding(devices).per_training, self.training_efficiency)

    def update_s(self, devices: int, last_tokens: float) -> float:
        """Return the seconds of one optimizer update of one model.

        The state is read and written once. Gradients not reduced yet are reduced beside the backward pass (2/3 of the
        time) of the last micro-batch of up to `last_tokens` tokens. Gathering the new weights is charged to the
        engines.
        """
        moved = self.optimizer_bytes_per_parameter * self.model.parameters / devices / self.device.memory_bytes_per_s
        if self.hosted:
            moved += 12 * self.model.parameters / devices / self.device.host_bytes_per_s
        behind = 2 / 3 * self.train_s(min(last_tokens, devices * self.micro_batch_tokens), devices)
        return moved + max(0.0, self.sharding(devices).per_update * self.gather_s(devices) - behind)

    def gather_s(self, devices: int) -> float:
        """Return the seconds to gather sharded weights (or reduce gradients) once, over the slower of links and network."""
        if devices == 1:
            return 0.0
        rate = self.device.link_bytes_per_s
        if devices > self.devices_per_node:
            rate = min(rate, self.device.net_bytes_per_s)
        return (devices - 1) / devices * self.model.weight_bytes / rate

    def balanced_tokens(self, devices: int) -> int:
        """Return the tokens per device from which a micro-batch computes at least as long as it moves weights.

        It also computes at half of the possible efficiency at least. Smaller micro-batches waste devices. The result lies
        between `least_batch_tokens` and `micro_batch_tokens`.
        """
        kind, gather = self.sharding(devices), self.gather_s(devices) / self.model.flops_per_token
        forward = kind.per_forward * gather * self.flops_per_s(self.forward_efficiency)
        train = kind.per_training * gather * self.flops_per_s(self.training_efficiency) / 3
        half = self.half_efficiency_tokens
        return int(min(self.micro_batch_tokens, max(self.least_batch_tokens, half, forward - half, train - half)))

    def _pass_s(self, tokens: float, devices: int, work: float, gathers: float, efficiency: float) -> float:
        if tokens <= 0:
            return 0.0
        batches = math.ceil(tokens / (devices * self.micro_batch_tokens))
        computed = work * self.model.flops_per_token * (tokens / devices + batches * self.half_efficiency_tokens)
        return max(computed / self.flops_per_s(efficiency), batches * gathers * self.gather_s(devices))
