"""The memory of a run's functions: engines, learner, critic, reference and reward model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

from placement import memory, peak_memory
from placement.drafting.acceptance import MODEL_SEQUENCES
from placement.peak_memory import MicroBatch
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.model_checks import refusal
from rlhfless_ray.local.machine_memory import snapshot_every_steps
from rlhfless_ray.local.process_memory import LARGE_PARAMETERS
from rlhfless_ray.preflight.memory_needs import CPU, GPU, UNREAD, JobMemory, Lengths, Need, Parts, Room, Settings, TrainedModel
from rlhfless_ray.preflight.model_size import ModelSize, models_of
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.section import LEAST_KV_MB
from rlhfless_ray.weights.quantized_base import has_4_bits

TRAINED_BYTES = 4 + memory.GRADIENT_BYTES + memory.MOMENT_BYTES  # bytes per parameter of a trained drafter, in float32
SURE_SEQUENCES = 2  # with KV for two of the longest sequences an engine holds one, whatever kinds of attention its layers have


@dataclass(frozen=True)
class RunMemory(JobMemory):
    """`lengths`: of the prompts."""

    recipe: Recipe
    lengths: Lengths = UNREAD
    auto_keys: ClassVar = ("micro_batch_tokens", "gradient_checkpointing", "optimizer_offload")

    @classmethod
    def of(cls, recipe: Recipe, lengths: Lengths = UNREAD, *, fetch: bool = True, policy: tuple[JsonObject, int] | None = None) -> Self:
        """Read the models' sizes. `fetch`, `policy`: see `models_of`."""
        return cls(recipe, models_of(recipe, fetch, policy), lengths)

    @property
    def value_bytes(self) -> int:
        return memory.VALUE_BYTES[self.recipe.policy.dtype]

    @property
    def longest_tokens(self) -> int:
        return self.recipe.longest_tokens(self.lengths.longest_prompt)

    @property
    def rooms(self) -> tuple[Room, ...]:
        slots = self.recipe.rollout.max_actors * self.recipe.rollout.least_width + self.recipe.learner.ranks
        return Room(CPU, slots, None, has_driver=True), Room(GPU, 1, None)

    def with_longest_texts(self) -> Self:
        return replace(self, lengths=Lengths(self.recipe.prompts.max_prompt_tokens))

    @property
    def texts(self) -> str:
        return f"prompts of {self.lengths.longest_prompt} and responses of {self.recipe.rollout.max_tokens} tokens"

    @property
    def imports_bytes(self) -> int:
        engine = peak_memory.ENGINE_BYTES + self.recipe.rollout.engine_kv_mb * 2**20
        return peak_memory.DRIVER_BYTES + self.recipe.learner.ranks * peak_memory.LEARNER_BYTES + engine

    @cached_property
    def trained(self) -> dict[str, TrainedModel]:
        """Return the models that are trained: "learner" and "critic"."""
        tokens, recipe = self.lengths.shortest_prompt + 1, self.recipe
        found = {}
        if recipe.learns and "policy" in self.models:
            found["learner"] = TrainedModel.of(recipe, self.models["policy"], recipe.learner, tokens, has_head=True)
        if recipe.learns and "critic" in self.models:
            found["critic"] = TrainedModel.of(recipe, self.models["critic"], recipe.critic, tokens, has_head=False)
        return found

    @property
    def reference(self) -> tuple[ModelSize, int] | None:
        """Return the reference and the bytes of weights in each of its ranks. None if there is none, or its size is not known."""
        model = self.models.get("reference", self.models.get("policy")) if self.recipe.has_reference else None
        if model is None:
            return None
        training = memory.Training(tensor_parallel=self.recipe.reference.tensor_parallel, undivided=memory.end_parameters(model.config))
        return model, training.own(model.parameters) * self.value_bytes

    # ---- lower bounds -----------------------------------------------------------------------------------------------

    def least(self, room: Room) -> list[Need]:
        if room.on_gpu:
            return self._least_of_devices()
        return self._least_of_nodes(room.has_driver) if "policy" in self.models else []

    def _least_of_devices(self) -> list[Need]:
        """Return each function's need on one GPU while it works; functions take turns on a device."""
        recipe, width, longest, needs = self.recipe, self.value_bytes, self.longest_tokens, []
        slots, share = recipe.rollout.least_width, recipe.rollout.gpu_memory_share
        parts: Parts
        if policy := self.models.get("policy"):
            kv = memory.kv_bytes(policy.config, longest, width, slots)
            parts = (("weights", self.engine_weights // slots), (f"KV cache of one sequence of {longest} tokens", kv))
            needs.append(Need("an engine", policy.key, parts, True, share, slots, function="engines"))
        if drafter := self.models.get("drafter"):
            kv = MODEL_SEQUENCES * memory.kv_bytes(drafter.config, longest, width)
            parts = (("weights", drafter.parameters * width), (f"KV of {MODEL_SEQUENCES} sequences", kv))
            needs.append(Need("the drafter beside an engine", drafter.key, parts, True, 1 - share))
        for name, trained in self.trained.items():
            needs.append(Need(f"a {name} rank", trained.model.key, trained.rank.on_device, True))
        if self.reference:
            model, weights = self.reference
            needs.append(Need("a reference rank", model.key, (("weights", weights),), True))
        if reward := self.models.get("reward"):
            parts = (("weights", reward.body * width // recipe.reward.tensor_parallel),)
            needs.append(Need("a reward model rank", reward.key, parts, True))
        return needs

    def _least_of_nodes(self, has_driver: bool) -> list[Need]:
        """Return the needs of nodes whose slots are cores: of each kind of work at once, and of single processes.

        The learner and the critic keep their state in memory for the whole run. Parked engines, references and reward processes are
        ended if memory is short, so they count only while they work.
        """
        recipe, width, policy = self.recipe, self.value_bytes, self.models["policy"]
        filters = recipe.run.episodes is not None and recipe.algorithm.filter_range is not None  # then the last step may be the first
        learned = recipe.run.steps > 1 and not filters  # the first update makes the moments, and engines work once more after it
        idle = {n: (f"in the {n}", one.ranks * (one.rank.idle if learned else one.rank.loaded)) for n, one in self.trained.items()}
        average = memory.AVERAGE_BYTES * policy.parameters
        driver: Parts = (("in the average of the weights", average),) if recipe.ema.beta is not None else ()
        engine: Parts = (
            ("in engine weights", self.engine_weights),
            ("in drafter weights", self.drafter_bytes),
            ("in KV cache", self.least_kv_mb * 2**20),  # vLLM does not start an engine unless this much is free
        )
        needs, opened = [], driver
        for name, one in self.trained.items():
            key, rank, ranks, who = one.model.key, one.rank, one.ranks, f"a {name} rank"
            several = "" if ranks == 1 else f" in its {ranks} ranks"
            passed_on = (("in the object store", one.model.stored),) if has_driver else ()  # the driver itself only maps the folder's files
            needs.append(Need(who, key, ((f"in the {name}", rank.weights),), True))
            needs.append(Need(f"loading the {name}{several}", key, (*opened, *passed_on, (f"in the {name}", ranks * rank.weights))))
            opened = (*opened, idle[name])
            if recipe.run.steps > 0:
                others = tuple(part for other, part in idle.items() if other != name)
                training = (*driver, *others, *_times(ranks, rank.training))
                needs.append(Need(who, key, rank.training, True, function=name, processes=ranks))
                needs.append(Need(f"the {name}'s update{several}", key, training))
                if name == "learner" and recipe.rollout.rolls_out_ahead:  # engines may still load the previous version
                    versions = ("in the object store", policy.parameters * width)
                    beside = (*training, versions, *_times(recipe.rollout.min_actors, engine))
                    needs.append(Need("the rollout beside the learner's update", key, beside))

        def works(who: str, together: str, count: int, key: str, parts: Parts, function: str = "") -> None:
            several = "" if count == 1 else f" of {count}"
            needs.append(Need(who, key, parts, True, function=function, processes=1 if function == "engines" else count))
            needs.append(Need(together, key, (*opened, *((f"{what}{several}", count * size) for what, size in parts))))

        works("an engine", "the rollout", recipe.rollout.min_actors, policy.key, engine, "engines")
        if recipe.rollout.drafter_train == "on" and (drafter := self.models.get("drafter")):
            parts = (*opened, *_times(recipe.rollout.min_actors, engine), ("in the drafter's training", drafter.parameters * TRAINED_BYTES))
            needs.append(Need("the drafter's training beside the rollout", drafter.key, parts))
        if self.reference:
            model, weights = self.reference
            parts = (("in the reference", weights),)
            works("a reference rank", "the reference rank's pass", recipe.reference.ranks, model.key, parts, "reference")
        if reward := self.models.get("reward"):
            parts = (("in the reward model", reward.body * width),)
            works("a reward model rank", "the reward model rank's pass", 1, reward.key, parts)
        return needs

    @property
    def engine_weights(self) -> int:
        """Return the bytes of an engine's weights. Routers, norms and biases count as quantised, and so do the ends of a 4-bit base."""
        policy, width, kind = self.models["policy"], self.value_bytes, self.recipe.rollout.quantization
        if has_4_bits(policy.config):
            return policy.parameters // 2
        if kind == "off":
            return policy.parameters * width
        kept = memory.end_parameters(policy.config) + (memory.expert_parameters(policy.config) if kind == "int8" else 0)
        return policy.parameters + (width - 1) * min(kept, policy.parameters)

    @property
    def drafter_bytes(self) -> int:
        drafter = self.models.get("drafter")
        return drafter.parameters * self.value_bytes if drafter else 0

    def kv_mb(self, sequences: int) -> int:
        """Return the MB of KV cache in which an engine holds `sequences` of the longest sequences at once, 0 if that is not known."""
        rollout, config = self.recipe.rollout, self.models["policy"].config
        size = peak_memory.kv_cache_bytes(config, sequences, self.longest_tokens, rollout.block_size, self.value_bytes, rollout.least_width)
        return max(LEAST_KV_MB, math.ceil(size / 2**20)) if size else 0

    @property
    def least_kv_mb(self) -> int:
        """Return the MB of the smallest KV cache that an engine may have: its own if it is set, else that of one sequence."""
        rollout = self.recipe.rollout
        return rollout.kv_cache_mb if rollout.kv_cache_mb != "auto" else self.kv_mb(1) or rollout.engine_kv_mb

    # ---- predictions ------------------------------------------------------------------------------------------------

    def peaks(self, room: Room) -> list[Need]:
        """Predict peaks, where parked engines release weights and KV cache. Rewards are part of the driver's figure."""
        return self.peaks_with(room, engines_keep=False)

    def peaks_with(self, room: Room, *, engines_keep: bool) -> list[Need]:
        """Predict peaks. `engines_keep`: whether parked engines keep weights and KV cache."""
        policy = self.models.get("policy")
        if policy is None:
            return []
        recipe, width, needs, idle, updates = self.recipe, self.value_bytes, [], {}, {}
        for name, one in self.trained.items():
            batch = self._micro_batch(one.ranks // one.training.sequence_parallel, has_logits=name == "learner")
            parts = one.peak(recipe, batch, room.on_gpu)
            who, key, ranks = f"a {name} rank", one.model.key, one.ranks
            needs.append(Need(who, key, parts, True, predicted=True, function=name, processes=ranks, of_update=True))
            in_store = 0 if room.on_gpu else _bytes_in_store(name, one)
            idle[name], updates[name] = ranks * (one.rank.idle + peak_memory.LEARNER_BYTES) - in_store, (needs[-1], in_store)
        if room.on_gpu:
            parked = tuple((f"in the {name}", one.ranks * one.rank.idle) for name, one in self.trained.items())
            return [*needs, Need("parked ranks", policy.key, parked, True, predicted=True, on_host=True)] if parked else needs
        members = recipe.rollout.least_width
        parts = peak_memory.engine_parts(policy.parameters, width, recipe.rollout.engine_kv_mb * 2**20, members, self.drafter_bytes)
        engine = Need("an engine", policy.key, parts, True, predicted=True, function="engines")
        needs.append(engine)
        others = [("in driver and object store", peak_memory.DRIVER_BYTES + policy.parameters * width + self._kept_bytes())]
        if self.reference:
            model, weights = self.reference
            ranks = recipe.reference.ranks
            parts = peak_memory.pass_parts(model.config, weights // width, width, self._micro_batch(ranks))
            needs.append(Need("a reference rank", model.key, parts, True, predicted=True, function="reference", processes=ranks))
            others.append(("in the parked reference", ranks * peak_memory.PASS_BYTES))
        engines = self.engines_at_once(room)
        at_work = self._engines_beside_update(engines, room.slots)
        parked_bytes = engine.bytes if engines_keep else members * peak_memory.ENGINE_BYTES
        waiting = (("in engines", at_work * engine.bytes), ("in parked engines", (engines - at_work) * parked_bytes))
        for name, (need, in_store) in updates.items():
            beside = [(f"in the {other}", kept) for other, kept in idle.items() if other != name]
            own = ((what, need.processes * size - (in_store if what == "weights" else 0)) for what, size in need.parts)
            needs.append(Need(f"the {name}'s update", need.key, (*own, *beside, *waiting, *others), predicted=True, of_update=True))
        parts = (("in engines", recipe.rollout.min_actors * engine.bytes), *((f"in the {n}", s) for n, s in idle.items()), *others)
        return [*needs, Need("the rollout", policy.key, parts, predicted=True)]

    def updates_at_once(self, needs: Iterable[Need]) -> Need | None:
        """Return the predicted peak of policy and critic that learn at the same time on cores. `needs`: see `peaks`. None: no critic."""
        by_who = {need.who: need for need in needs}
        update, critic = by_who.get("the learner's update"), by_who.get("a critic rank")
        if update is None or critic is None:
            return None
        beside = [(what, size) for what, size in update.parts if what != "in the critic"]
        return replace(update, who="both updates at once", parts=(*beside, *_times(critic.processes, critic.parts)))

    def engines_at_once(self, room: Room) -> int:
        return min(self.recipe.rollout.max_actors, max(1, room.slots // self.recipe.rollout.least_width))

    def _engines_beside_update(self, engines: int, slots: int) -> int:
        """Return how many of `engines` engines may work while gradients are computed."""
        ranks, rollout = self.recipe.learner.ranks, self.recipe.rollout
        if not rollout.rolls_out_ahead:
            return 0
        return min(engines, max(rollout.min_actors, (slots - ranks) // rollout.least_width))  # the learner holds a slot per rank or more

    def _micro_batch(self, ranks: int, *, has_logits: bool = True) -> MicroBatch:
        """Return the largest micro-batch of a rank, where every response is as long as it may be."""
        prompt, longest, per_prompt = self.lengths.longest_prompt, self.longest_tokens, self.recipe.rollout.samples_per_prompt
        step = math.ceil(self.recipe.prompts.batch_prompts * per_prompt / ranks) * longest
        tokens = min(max(self.recipe.learner.max_micro_batch_tokens, longest), step)
        row = min(tokens, prompt + per_prompt * (longest - prompt))
        return MicroBatch(tokens, max(longest, row), tokens if has_logits else 0, is_only=tokens == step)

    def _kept_bytes(self) -> int:
        """Return the bytes of the learner's state that the driver's node keeps in memory."""
        parameters = self.models["policy"].parameters
        average = memory.AVERAGE_BYTES * parameters if self.recipe.ema.beta is not None else 0
        if self.recipe.lora.rank or not snapshot_every_steps(self.recipe, parameters):
            return average
        return average + 2 * memory.snapshot_bytes(parameters, self.value_bytes)

    # ---- settings ---------------------------------------------------------------------------------------------------

    def savings(self, room: Room) -> Iterator[Settings]:
        learner, rollout = self.recipe.learner, self.recipe.rollout
        counts = sorted({*(2**k for k in range(room.slots.bit_length()) if 2**k <= room.slots), room.slots})
        for count in counts:
            if count > learner.ranks:
                if learner.zero_stage in (1, 2):
                    yield {"learner.ranks": count}
                yield {"learner.ranks": count, "learner.zero_stage": 3}
            if self.recipe.algorithm.has_critic and count > self.recipe.critic.ranks:
                yield {"critic.ranks": count}
        yield from self._savings_of_devices(room, counts) if room.on_gpu else self._savings_of_nodes()
        yield from self._narrower()
        shorter = rollout.max_tokens // 2
        while shorter and room.on_gpu:
            yield {"rollout.max_tokens": shorter}
            shorter //= 2
        if not self.recipe.lora.rank:
            yield {"lora.rank": 16}
        if rollout.rolls_out_ahead and not room.on_gpu:
            yield {"rollout.max_lag_steps": 0}

    def _savings_of_devices(self, room: Room, counts: list[int]) -> Iterator[Settings]:
        yield from self._offloaded()
        if self.recipe.rollout.gpu_memory_share < 0.95:
            yield {"rollout.gpu_memory_share": 0.95}
        widths = (count for count in self.engine_widths(room) if count > self.recipe.rollout.least_width)
        yield from ({"rollout.tensor_parallel": count} for count in widths)
        for count in counts:
            if self.reference and _divides(count, self.reference[0]):
                yield {"reference.ranks": count, "reference.tensor_parallel": count}
            if _divides(count, self.models.get("reward")):
                yield {"reward.tensor_parallel": count}

    def engine_widths(self, room: Room) -> list[int]:
        """Return the numbers of slots that an engine may have, none if they are not known."""
        policy = self.models.get("policy")
        return (memory.engine_widths(policy.config, room.slots) if policy else None) or []

    def _savings_of_nodes(self) -> Iterator[Settings]:
        recipe, least = self.recipe, self.kv_mb(SURE_SEQUENCES)
        counts = {
            "learner.ranks": recipe.learner.ranks,
            "critic.ranks": recipe.critic.ranks,
            "reference.ranks": recipe.reference.ranks,
            "rollout.min_actors": recipe.rollout.min_actors,
        }
        yield from ({key: 1} for key, count in counts.items() if count > 1)
        if recipe.rollout.kv_cache_mb != "auto" and 0 < least < recipe.rollout.kv_cache_mb:
            yield {"rollout.kv_cache_mb": least}


def _times(count: int, parts: Parts) -> Parts:
    return tuple((what, count * size) for what, size in parts)


def _divides(width: int, model: ModelSize | None) -> bool:
    """Return whether several processes can share a copy of the model."""
    return width > 1 and model is not None and refusal(model.config, width) is None


def _bytes_in_store(name: str, trained: TrainedModel) -> int:
    """Return the bytes of the weights that the ranks read from their published version, see `TrainerRank.read_published`.

    The optimizer step writes the rank's own again once it has freed the gradients, which take more.
    """
    training, is_large = trained.training, trained.parameters >= LARGE_PARAMETERS
    reads = name == "learner" and is_large and training.zero_stage in (1, 2) and not training.adapters and training.tensor_parallel == 1
    return trained.ranks * trained.rank.weights if reads else 0
