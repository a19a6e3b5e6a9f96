"""The model of a job's memory: which processes it has, what each of them holds, and what there is of a memory.

Lower bounds (`placement.memory`) decide whether a job is refused. Predicted peaks (`placement.peak_memory`) are estimates, and choose
settings that are `auto`.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from placement import memory, peak_memory
from placement.peak_memory import MicroBatch
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.preflight.model_size import ModelSize
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.learn_sections import CriticConfig, LearnerConfig
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

if TYPE_CHECKING:
    from rlhfless_ray.types import Prompt

CPU, GPU = "cpu", "gpu"
MIN_LISTED_BYTES = 5e7  # smaller parts of a need are not listed: they would read 0.0 GB
Settings = JsonObject  # values by recipe key
AUTO_KEYS = {  # of section `learner`, with the field of `UpdateSettings` that each takes
    "micro_batch_tokens": "micro_batch_tokens",
    "gradient_checkpointing": "checkpointing",
    "optimizer_offload": "offload",
}
Parts = tuple[tuple[str, int], ...]  # (name, bytes) of what is held at the same time


def gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest and the shortest prompt. Before prompts are read, the smallest possible numbers."""

    longest_prompt: int = 1
    shortest_prompt: int = 1


UNREAD = Lengths()


def lengths_of(*prompts: Iterable[Prompt]) -> Lengths:
    tokens = [len(prompt.token_ids) for prompt in itertools.chain(*prompts)]
    return Lengths(max(tokens), min(tokens))


@dataclass(frozen=True)
class Need:
    """Memory needed at the same time.

    Attributes:
        parts: (name, bytes) of each part.
        alone: whether the memory is needed by one process.
        share: usable share of a GPU.
        devices: number of devices, each of which needs this memory.
        predicted: whether this is an estimate of the peak instead of a lower bound.
        function: name of the function whose process this is, empty for several functions together; `processes`: number of its processes.
        of_update: whether the settings of an update change it.
        on_host: whether it is host memory beside GPUs.
    """

    who: str
    key: str
    parts: Parts
    alone: bool = False
    share: float = 1.0
    devices: int = 1
    predicted: bool = False
    function: str = ""
    processes: int = 1
    of_update: bool = False
    on_host: bool = False

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def is_engine(self) -> bool:
        return self.function == "engines"

    @property
    def listed_parts(self) -> str:
        return ", ".join(f"{gb(size)} {what}" for what, size in self.parts if size >= MIN_LISTED_BYTES)

    @property
    def where(self) -> str:
        return "its device" if self.devices == 1 else f"each of its {self.devices} devices"

    def __str__(self) -> str:
        several = sum(size >= MIN_LISTED_BYTES for _, size in self.parts) > 1
        return f"{'about' if self.predicted else 'at least'} {gb(self.bytes)}" + (f" ({self.listed_parts})" if several else "")


def megabytes(needs: Iterable[Need]) -> dict[str, float]:
    """Return the MB of each function, of all its processes together."""
    return {need.function: need.processes * need.bytes / 1e6 for need in needs if need.function}


def statement(predicted_mb: Mapping[str, float], least_mb: Mapping[str, float]) -> str:
    """Describe the predicted memory of the working functions in one line."""
    least = {name: f" (at least {mb / 1000:.1f})" for name, mb in least_mb.items()}
    called = {"engines": "one engine"}
    each = [f"{called.get(name, name)} {mb / 1000:.1f} GB{least.get(name, '')}" for name, mb in predicted_mb.items()]
    return f"predicted memory at work: {', '.join(each)}" if each else ""


@dataclass(frozen=True)
class Room:
    """The available memory.

    `bytes`: of the largest GPU, or of the largest node if slots are cores; None if unknown. `total_bytes`: of all such nodes.
    `has_driver`: the driver is on the only node. `host_bytes`: host memory beside the GPUs of the only node; None if unknown.
    """

    resource: str
    slots: int
    bytes: int | None
    total_bytes: int | None = None
    has_driver: bool = False
    host_bytes: int | None = None

    @property
    def on_gpu(self) -> bool:
        return self.resource == GPU

    @property
    def device(self) -> str:
        return "GPU" if self.on_gpu else "node"

    @property
    def shared_bytes(self) -> int | None:
        """Return the memory that all functions and runs share at the same time, None if it is not known."""
        return self.host_bytes if self.on_gpu else self.total_bytes or self.bytes

    def holds(self, need: Need, used_share: float = 1.0) -> bool:
        """Return whether the memory holds this need. `used_share`: share of the memory that may be used."""
        if need.on_host:
            return self.host_bytes is None or need.bytes <= self.host_bytes
        if self.bytes is None:
            return True
        there = self.bytes * need.share if need.alone or self.on_gpu else self.total_bytes or self.bytes
        return need.bytes <= used_share * there

    def first_without_room(self, needs: Iterable[Need], used_share: float = 1.0) -> Need | None:
        if not self.on_gpu and self.bytes == self.total_bytes:
            needs = [need for need in needs if not need.alone]  # on one node, processes together need more than each alone
        return next((need for need in needs if not self.holds(need, used_share)), None)

    def shortage(self, need: Need) -> str:
        """Return a sentence about a need that this memory does not hold."""
        if need.on_host:
            return f"{need.who} need {need} of host memory, and this machine has {gb(self.host_bytes or 0)}"
        assert self.bytes is not None
        if self.on_gpu:
            usable = f", of which {gb(self.bytes * need.share)} may be used (rollout.gpu_memory_share={need.share:g})"
            where = "one device" if need.devices == 1 else need.where
            return f"{need.who} needs {need} on {where}, and a GPU here has {gb(self.bytes)}{usable if need.share < 1 else ''}"
        if need.alone:
            return f"{need.who} needs {need} of memory, and the largest node has {gb(self.bytes)}"
        there = f"this machine has {gb(self.bytes)}" if self.has_driver else f"the nodes have {gb(self.total_bytes or self.bytes)} together"
        return f"{need.who} needs {need} of memory at once, and {there}"


@dataclass(frozen=True)
class TrainedModel:
    """A model in the ranks that train it. `parameters`: those of the model that it has. `rank`: lower bounds of a rank."""

    model: ModelSize
    parameters: int
    training: memory.Training
    rank: memory.RankMemory

    @classmethod
    def of(
        cls, recipe: Recipe | SupervisedRecipe, model: ModelSize, ranks: LearnerConfig | CriticConfig, tokens: int, *, has_head: bool
    ) -> Self:
        """`ranks`: their number and division. `tokens`: of the smallest micro-batch. `has_head`: whether the model has an output head."""
        learner, width = recipe.learner, memory.VALUE_BYTES[recipe.policy.dtype]
        parameters = model.parameters if has_head else model.body
        training = memory.Training(
            ranks.ranks,
            learner.zero_stage,
            width,
            learner.offloads_optimizer,
            adapters=recipe.lora.rank > 0,
            tensor_parallel=ranks.tensor_parallel,
            undivided=memory.end_parameters(model.config) - (model.parameters - parameters),
            sequence_parallel=ranks.sequence_parallel,
        )
        activations = memory.activation_bytes(model.config, math.ceil(tokens / ranks.sequence_parallel), width)
        return cls(model, parameters, training, memory.rank_memory(parameters, training, activations))

    @property
    def ranks(self) -> int:
        return self.training.ranks

    def peak(self, recipe: Recipe | SupervisedRecipe, batch: MicroBatch, on_gpu: bool) -> Parts:
        """Return the predicted parts of a rank's update with this micro-batch."""
        return peak_memory.trainer_parts(
            self.model.config,
            self.parameters,
            self.training,
            batch,
            checkpointing=recipe.learner.recomputes_activations,
            lora_rank=recipe.lora.rank,
            on_gpu=on_gpu,
        )


@dataclass(frozen=True)
class JobMemory(ABC):
    """The memory of a recipe's processes. Settings that are `auto` count as their defaults."""

    recipe: Recipe | SupervisedRecipe
    models: dict[str, ModelSize]

    auto_keys: ClassVar[tuple[str, ...]]
    """Keys of `AUTO_KEYS` that the recipe has."""

    @abstractmethod
    def least(self, room: Room) -> list[Need]:
        """Return lower bounds: of each process, and where slots are cores also of processes together. Empty without the policy's size."""

    @abstractmethod
    def peaks(self, room: Room) -> list[Need]:
        """Predict the peak of each process, and where slots are cores also of processes together. Empty without the policy's size."""

    @property
    @abstractmethod
    def rooms(self) -> tuple[Room, ...]:
        """Rooms of unknown size in which the needs are largest, one of each kind."""

    @abstractmethod
    def with_longest_texts(self) -> Self:
        """Return the job with prompts or rows as long as they may be."""

    @property
    @abstractmethod
    def imports_bytes(self) -> int:
        """Return the bytes of the processes alone, for models of unknown size."""

    @abstractmethod
    def savings(self, room: Room) -> Iterator[Settings]:
        """Yield settings that save memory: first those that change the training result only by rounding."""

    def advice_without(self, room: Room) -> str:
        """Return what to change where no setting is enough."""
        return f"a smaller model, or {room.device}s with more memory"

    def with_settings(self, settings: Settings) -> Self:
        return replace(self, recipe=self.recipe.with_settings(settings))

    def least_mb(self) -> dict[str, float]:
        """Return the least memory in MB of each working function on cores, of all its processes together; of engines, that of one."""
        return megabytes(self.least(Room(CPU, 1, None)))

    @property
    def auto(self) -> list[str]:
        """Return the keys of section `learner` that are `auto`."""
        return [key for key in self.auto_keys if getattr(self.recipe.learner, key) == "auto"]

    def with_update(self, auto: list[str], choice: peak_memory.UpdateSettings) -> Self:
        """Return the job with a choice of the settings of section `learner` that are `auto`."""
        return self.with_settings({f"learner.{key}": getattr(choice, AUTO_KEYS[key]) for key in auto})

    def _narrower(self) -> Iterator[Settings]:
        """Yield settings that save memory and change the result."""
        sharded = {} if self.recipe.learner.zero_stage else {"learner.zero_stage": 1}
        if self.recipe.policy.dtype == "float32":
            yield {"policy.dtype": "bfloat16", **sharded}

    def _offloaded(self) -> Iterator[Settings]:
        if not self.recipe.learner.offloads_optimizer:
            yield {"learner.optimizer_offload": True, **({} if self.recipe.learner.zero_stage else {"learner.zero_stage": 1})}
