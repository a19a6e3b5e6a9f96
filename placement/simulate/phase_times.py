"""Phase times of a setting in seconds, which every step policy is charged alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from placement.simulate.setting import Setting
from placement.speed.decode_speed import Speed
from placement.speed.drafted_speed import DraftedSpeed
from placement.speed.model_sizes import Model
from placement.speed.roofline import TrainerModel, decode_speed, kv_capacity, quantise_s


@dataclass(frozen=True)
class PhaseTimes:
    """One setting in seconds.

    warm_s: wake an engine whose process was kept. wake_s: start a leased engine, cold if leases are cold starts. width:
    devices of an engine. reshard_s, broadcast_s: until an engine has the new weights, quantised ones included, on the learner's
    devices and on others. learner_step: devices by which a learner grows. min_learner: its least number of devices.
    wider: the same with wider engines, where policies may choose.
    """

    setting: Setting
    speed: Speed
    capacity: int
    static_capacity: int
    trainer: TrainerModel
    reward_trainer: TrainerModel | None
    width: int
    devices: int
    learner_step: int
    min_learner: int
    warm_s: float
    wake_s: float
    reshard_s: float
    broadcast_s: float
    migrate_s: float
    wider: tuple[PhaseTimes, ...] = ()

    @classmethod
    def from_setting(cls, s: Setting) -> PhaseTimes:
        """Compute the times, at the narrowest width that holds the model.

        Raises ValueError if the model does not fit the devices, for generation or for learning.
        """
        found, refused = [], None
        for width in s.widths:
            try:
                found.append(cls._of_width(s, width))
            except ValueError as error:
                refused = error
        if not found:
            assert refused is not None
            raise refused
        return replace(found[0], wider=tuple(found[1:]))

    @classmethod
    def _of_width(cls, s: Setting, width: int) -> PhaseTimes:
        p, model = s.phases, s.engine_model
        batch = max(2, math.ceil(s.prompts * s.samples * width / s.devices))
        context = s.prompt_limit / 2 + 256
        speed = decode_speed(model, s.device, width, batch, context)
        if s.acceptance:
            speed = DraftedSpeed.of(speed, s.acceptance, batch)
        state = (2 if s.algorithm == "ppo" else 1) * p["state_bytes_per_parameter"] * s.model.parameters
        learner_step = width if width > 1 else 1
        min_learner = math.ceil(state / (p["usable_memory"] * s.device.memory_bytes) / learner_step) * learner_step
        if min_learner > s.devices:
            needed = f"training {s.model.name} ({state / 1e9:.0f} GB of state) needs {min_learner} x {s.device.name}"
            raise ValueError(f"{needed}; the cluster has {s.devices}")
        cold = p["cold_start_parallel_s"] if width > 1 else p["cold_start_s"]
        warm = p["warm_start_s"] + p["warm_start_per_parameter_s"] * s.model.parameters
        resident = s.model.kv_bytes(width) * (s.response_limit / 2 + s.prompt_limit / 2)
        quantising = quantise_s(model, s.device, width, p["quantise_bytes_per_parameter"])
        pause = p["migration_pause_s"] + resident / width / s.device.link_bytes_per_s
        return cls(
            s,
            speed,
            kv_capacity(model, s.device, width, p["engine_memory"]),
            kv_capacity(model, s.device, width, p["static_engine_memory"]),
            _trainer(s, s.model, 2 if s.algorithm == "ppo" else 1),
            _trainer(s, s.reward_model, 1) if s.reward_model else None,
            width,
            s.devices,
            learner_step,
            min_learner,
            s.start_scale * warm,
            s.start_scale * (cold if s.cold else warm),
            p["weight_sync_s"] + s.model.weight_bytes / s.device.reshard_bytes_per_s + quantising,
            s.model.weight_bytes / s.device.broadcast_bytes_per_s + quantising,
            s.migrate_scale * pause,
        )

    @property
    def ppo(self) -> bool:
        return self.setting.algorithm == "ppo"

    @property
    def widths(self) -> tuple[PhaseTimes, ...]:
        """The times at every width that may be chosen, narrowest first."""
        return (replace(self, wider=()), *self.wider)

    def at(self, width: int) -> PhaseTimes:
        """Return the times with engines of `width` devices. 0: these times."""
        return next(times for times in self.widths if width in (0, times.width))

    @property
    def engines(self) -> int:
        """Number of engines that fit the cluster."""
        return self.devices // self.width

    def sizes(self, most: int | None = None) -> list[int]:
        """Return possible learner sizes in devices: from the least that holds its state, in steps of about a half, up to `most`."""
        most = self.devices if most is None else most
        found, size = [], self.min_learner
        while size < most:
            found.append(size)
            size = max(size + self.learner_step, math.ceil(size * 1.5 / self.learner_step) * self.learner_step)
        return [*found, most] if most >= self.min_learner else found

    # ---- phases: seconds on `m` devices that hold the learner's state -----------------------------------------

    def prepare_s(self, tokens: float, m: int) -> float:
        """Return the seconds between generation and learning for `tokens` tokens on m devices.

        These are log-probabilities under the sampling policy (VERL recomputes them) and under the reference, the
        critic's values (PPO), and the reward model's scores where there is one.
        """
        each = self.trainer.forward_s(tokens, m)
        reward = self.reward_trainer.forward_s(tokens, m) if self.reward_trainer else 0.0
        return (3 if self.ppo else 2) * each + reward

    def gradients_s(self, tokens: float, m: int, models: float) -> float:
        """Return the seconds of forward and backward of `models` models over these tokens."""
        return models * self.setting.learn_scale * self.trainer.train_s(tokens, m)

    @property
    def models(self) -> int:
        """Number of models that learn: the policy, and PPO's critic."""
        return 2 if self.ppo else 1

    def update_s(self, m: int, last_tokens: float) -> float:
        """Return the seconds of one optimizer update of every learning model, after a last micro-batch of up to this many tokens."""
        return self.models * self.trainer.update_s(m, last_tokens)

    def learn_s(self, tokens: float, m: int) -> float:
        """Return the seconds of all learning after the last response: `updates` batches, each with its optimizer update."""
        u = self.setting.updates
        return u * (self.gradients_s(tokens / u, m, self.models) + self.update_s(m, tokens / u))

    def prefill_s(self, tokens: float, engines: int) -> float:
        """Return the seconds before decoding: a step's fixed ones, and the prefill of this many tokens, shared by all engines."""
        rate = engines * self.width * self.trainer.flops_per_s(self.trainer.forward_efficiency)
        return self.setting.phases["step_overhead_s"] + self.setting.model.flops_per_token * tokens / rate

    def state_s(self, m: int) -> float:
        """Return the seconds to move the learner's state (and the frozen reference) between host and device, on one of m devices."""
        s = self.setting
        held = (self.models * s.phases["state_bytes_per_parameter"] + 2) * s.model.parameters
        return held / m / s.device.host_bytes_per_s

    def awake_capacity(self, m: int) -> int:
        """Return the KV tokens of an engine that stays awake on one of m learning devices, or 0 if there is no room.

        It may use the memory left by the learner's state, its activations and the engine's weights.
        """
        s = self.setting
        room = s.device.memory_bytes * s.phases["usable_memory"] - self.trainer.held_bytes(m)
        kv = s.model.kv_bytes(self.width)
        return max(0, min(self.capacity, int((self.width * room - s.engine_model.engine_bytes) // kv)))

    def holds_one(self, room: int) -> bool:
        """Return whether an engine of this many KV tokens holds the longest possible sequence, which staying awake requires."""
        return room >= self.setting.response_limit + self.setting.prompt_limit

    def learner(self, *, awake: bool = False, hosted: bool = False) -> PhaseTimes:
        """Return the same times with another learner.

        awake: it leaves room for an engine (weights, and KV of an even share of the sequences at half their limits), so it
        may have to shard more. hosted: its optimizer's state stays in host memory until the update, so it may have to shard
        less.
        """
        s = self.setting
        each = (s.prompt_limit + s.response_limit) / 2
        tokens = s.prompt_limit + s.response_limit + each * s.prompts * s.samples / self.engines
        kv = s.model.kv_bytes(self.width)
        engine = (s.engine_model.engine_bytes + tokens * kv) / self.width if awake else 0.0
        usable = s.phases["usable_memory"] - engine / s.device.memory_bytes
        return replace(self, trainer=replace(self.trainer, usable_memory=usable, hosted=hosted))

    def fits(self, m: int) -> bool:
        """Return whether the learner's state fits m devices."""
        s = self.setting
        return self.trainer.held_bytes(m) <= self.trainer.usable_memory * s.device.memory_bytes

    def resize_s(self, before: int, after: int) -> float:
        """Return the seconds to reshard the learner to another number of devices, by the faster of two ways.

        The state comes from the other devices over the links, or from the host's copy of weights and optimizer state,
        which no update has changed since.
        """
        if before == after:
            return 0.0
        s = self.setting
        held = self.models * s.phases["state_bytes_per_parameter"] * s.model.parameters
        return min(held / min(before, after) / s.device.link_bytes_per_s, self.state_s(after))


def _trainer(s: Setting, model: Model, models: int) -> TrainerModel:
    p = s.phases
    return TrainerModel(
        model,
        s.device,
        s.devices_per_node,
        models,
        p["usable_memory"],
        p["training_efficiency"],
        p["forward_efficiency"],
        int(p["micro_batch_tokens"]),
        int(p["least_batch_tokens"]),
        p["optimizer_bytes_per_parameter"],
        half_efficiency_tokens=p["half_efficiency_tokens"],
        mixture_efficiency=p["mixture_efficiency"],
    )
