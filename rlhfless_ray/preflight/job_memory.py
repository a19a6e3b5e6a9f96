"""The model of a job's memory: which processes it has, and what each of them holds.

Lower bounds (`placement.memory`) decide whether a job is refused. Predicted peaks (`placement.peak_memory`) are estimates, and choose
settings that are `auto`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from placement import memory, peak_memory
from placement.peak_memory import MicroBatch
from rlhfless_ray.preflight.model_size import ModelSize
from rlhfless_ray.preflight.need import CPU, Need, Parts, Room, megabytes
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.learn_sections import CriticConfig, LearnerConfig
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

Settings = dict[str, Any]  # values by recipe key
AUTO_KEYS = {  # of section `learner`, with the field of `UpdateSettings` that each takes
    "micro_batch_tokens": "micro_batch_tokens",
    "gradient_checkpointing": "checkpointing",
    "overlap": "overlap",
    "optimizer_offload": "offload",
}


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
