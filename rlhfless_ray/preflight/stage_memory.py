"""The memory of a supervised stage: its ranks, which may have a reference or a teacher too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from placement import memory, peak_memory
from placement.peak_memory import MicroBatch, UpdateSettings
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.model_checks import slicing_refusal
from rlhfless_ray.preflight.memory_needs import CPU, GPU, JobMemory, Need, Parts, Room, Settings, TrainedModel
from rlhfless_ray.preflight.model_size import ModelSize, models_of
from rlhfless_ray.recipe.learn_sections import even_ranks
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe


@dataclass(frozen=True)
class StageMemory(JobMemory):
    """`row_tokens`: of the longest row; 0: not known yet.

    Of activations the inputs of all layers count for the longest row: they are kept even where activations are recomputed.
    """

    recipe: SupervisedRecipe
    row_tokens: int = 0
    auto_keys: ClassVar = ("micro_batch_tokens", "gradient_checkpointing", "optimizer_offload")

    @classmethod
    def of(cls, recipe: SupervisedRecipe, row_tokens: int = 0, *, fetch: bool = True, policy: tuple[JsonObject, int] | None = None) -> Self:
        """Read the models' sizes. `fetch`, `policy`: see `models_of`."""
        return cls(recipe, models_of(recipe, fetch, policy), row_tokens)

    @property
    def rooms(self) -> tuple[Room, ...]:
        return Room(CPU, 1, None), Room(GPU, 1, None)

    def with_longest_texts(self) -> Self:
        return replace(self, row_tokens=self.recipe.data.max_tokens)

    @property
    def texts(self) -> str:
        return f"rows of {self.row_tokens} tokens"

    @property
    def imports_bytes(self) -> int:
        return peak_memory.DRIVER_BYTES + self.recipe.min_ranks * peak_memory.LEARNER_BYTES

    def trained(self, room: Room) -> TrainedModel:
        """Return the policy in as many ranks as need least: on GPUs the most that share copies evenly, and the fewest on cores."""
        learner, least = self.recipe.learner, self.recipe.min_ranks
        most = even_ranks(min(learner.ranks, room.slots), learner.tensor_parallel)
        ranks = learner.on_ranks(max(least, most) if room.on_gpu else least)
        return TrainedModel.of(self.recipe, self.models["policy"], ranks, self.row_tokens, has_head=self.recipe.task != "rm")

    def least(self, room: Room) -> list[Need]:
        if "policy" not in self.models:
            return []
        trained = self.trained(room)
        held = trained.rank.on_device if room.on_gpu else trained.rank.training
        row = f"activations of a row of {self.row_tokens} tokens" if self.row_tokens else "activations"
        teacher: Parts = ()
        if "teacher" in self.models:
            teacher = (("teacher", _teacher_bytes(self.models["teacher"], trained.training)),)
        training = (*((row if what == "activations" else what, size) for what, size in held), *teacher)
        loading = (("weights while loading", trained.rank.weights), *teacher)
        if "reference" in self.models:  # its log-probabilities are computed before the optimizer's state is made
            loading = (*loading, ("reference", self.models["reference"].parameters * trained.training.value_bytes))
        key, ranks = trained.model.key, trained.ranks
        needs = [Need("a rank", key, loading, True), Need("a rank", key, training, True, function="learner", processes=ranks)]
        if not room.on_gpu:
            together = [tuple((what, ranks * size) for what, size in parts) for parts in (loading, training)]
            needs += [Need(_together(ranks), key, parts) for parts in together]
        return needs

    def peaks(self, room: Room) -> list[Need]:
        if "policy" not in self.models:
            return []
        recipe, trained, longest = self.recipe, self.trained(room), self.row_tokens
        training, ranks = trained.training, trained.ranks
        step = math.ceil(recipe.data.batch_rows * longest * training.tensor_parallel * training.sequence_parallel / ranks)
        tokens = min(max(recipe.learner.max_micro_batch_tokens, longest), step)
        targets = 0 if recipe.task == "rm" else tokens
        batch = MicroBatch(tokens, longest, targets, is_only=tokens == step, is_masked=recipe.task in ("rm", "dpo"))
        parts = trained.peak(recipe, batch, room.on_gpu)
        if teacher := self.models.get("teacher"):
            held = _teacher_bytes(teacher, training) + peak_memory.logits_bytes(teacher.config, targets)
            parts = (*parts, ("teacher", held))
        key = trained.model.key
        rank = Need("a rank", key, parts, True, predicted=True, function="learner", processes=ranks, of_update=True)
        if room.on_gpu:
            return [rank]
        driver = ("driver", peak_memory.DRIVER_BYTES)
        together = (*((what, ranks * size) for what, size in parts), driver)
        return [rank, Need(_together(ranks), key, together, predicted=True, of_update=True)]

    def savings(self, room: Room) -> Iterator[Settings]:
        learner = self.recipe.learner
        if room.on_gpu:
            if room.slots > learner.ranks or learner.zero_stage < 3:
                yield {"learner.ranks": max(room.slots, learner.ranks), "learner.zero_stage": 3}
            for size in (2**k for k in range(1, room.slots.bit_length())):
                if size > learner.sequence_parallel and slicing_refusal(self.models["policy"].config, size) is None:
                    yield {"learner.ranks": max(learner.ranks, room.slots) // size * size, "learner.sequence_parallel": size}
            yield from self._offloaded()
        elif self.recipe.min_ranks > 1:
            yield {"learner.ranks": 1}
        yield from self._narrower()
        if not self.recipe.lora.rank:
            yield {"lora.rank": 16}

    def advice_without(self, room: Room) -> str:
        short_rows = room.first_without_room(replace(self, row_tokens=0).least(room)) is None
        return ("shorter rows (data.max_tokens), " if self.row_tokens and short_rows else "") + super().advice_without(room)

    def with_update(self, auto: list[str], choice: UpdateSettings) -> Self:
        """Leave the default of `micro_batch_tokens` as `auto`, because ranks on cores then pack rows into smaller micro-batches."""
        is_default = choice.micro_batch_tokens == UpdateSettings().micro_batch_tokens
        return super().with_update([key for key in auto if key != "micro_batch_tokens" or not is_default], choice)


def _together(ranks: int) -> str:
    return "the rank" if ranks == 1 else f"the stage with its {ranks} ranks"


def _teacher_bytes(teacher: ModelSize, training: memory.Training) -> int:
    """Return the bytes of a teacher's weights on one rank."""
    return replace(training, undivided=memory.end_parameters(teacher.config)).own(teacher.parameters) * training.value_bytes
