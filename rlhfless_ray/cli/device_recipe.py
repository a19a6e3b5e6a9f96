"""A recipe's keys for devices that need not be here: engines, learner ranks, ZeRO stage and micro-batches, checked as a run checks them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhfless_ray.cli.memory_table import checked_run
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.preflight.memory_check import check
from rlhfless_ray.preflight.memory_fit import Fit, fit
from rlhfless_ray.preflight.memory_needs import GPU, Room, gb
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.reading import apply_override
from rlhfless_ray.recipe.starting_tree import starting_tree
from rlhfless_ray.recipe.yaml_text import write_yaml

if TYPE_CHECKING:
    from placement.catalog.catalog import Described
    from placement.layouts import Layout
    from placement.speed.roofline import Device

NODE, MOST = 8, 1024  # devices of a node, and of a plan
FITTED = ("micro_batch_tokens", "gradient_checkpointing", "optimizer_offload")  # keys of `learner` that the memory decides


def device_of(name: str) -> Device:
    """Return a GPU of the catalog, or of a file of its fields. Raises UserError."""
    from placement.catalog import catalog

    try:
        kind = catalog.device(name)
    except ValueError as error:
        raise UserError(str(error)) from None
    if kind.name.startswith("CPU"):
        raise UserError(f"--device {name}: name a GPU; without --device this machine's own memory is taken")
    return kind


def device_room(device: Device, count: int) -> Room:
    """Return the memory of so many devices by their data sheet. Host memory is not known. Raises UserError."""
    if not 1 <= count <= MOST or (count > NODE and count % NODE):
        raise UserError(f"--gpus {count}: must be 1 to {MOST}, and more than {NODE} must be whole nodes of {NODE}")
    return Room(GPU, count, int(device.memory_bytes), int(count * device.memory_bytes))


@dataclass(frozen=True)
class DeviceRecipe:
    """A recipe that fits `room`. tree: as a user would write it; fitted: with the settings that are `auto` decided."""

    tree: JsonObject
    fitted: Fit[RunMemory]
    room: Room

    @property
    def text(self) -> str:
        return write_yaml(self.tree)

    @property
    def memory(self) -> str:
        """Describe what engines and ranks take of a device's memory."""
        recipe, there = self.fitted.job.recipe, gb(self.room.bytes or 0)
        share = recipe.rollout.gpu_memory_share
        least = next(need for need in self.fitted.job.least(self.room) if need.is_engine)
        engine = f"an engine takes {share:.0%} of {there} on each of its GPUs and needs at least {gb(least.bytes)}"
        others = (f"{need.who} about {gb(need.bytes)}{' of host memory' * need.on_host}" for need in self.fitted.needs if need.alone)
        return "; ".join([engine, *others])


def written_tree(model: str, overrides: Sequence[str]) -> JsonObject:
    """Return the starting recipe for a model on GPUs, with the user's own settings."""
    tree = starting_tree(model)
    tree["policy"]["dtype"] = "bfloat16"
    tree["prompts"]["batch_prompts"] = 64
    tree["rollout"]["max_tokens"] = 2048
    tree["learner"]["zero_stage"] = 1
    for override in overrides:
        apply_override(tree, override, Recipe)
    return tree


def device_recipe(
    tree: JsonObject, overrides: Sequence[str], model: Described, device: Device, room: Room, engine_width: int
) -> DeviceRecipe:
    """Return the recipe with the fastest learner layout that passes the checks of a run on these devices.

    The learner has all devices, and so have the engines: phases take turns. Settings in `overrides` stay as they are. Raises UserError
    with the last refusal if no layout passes.
    """
    from placement.memory import parameter_count

    parameters, found, refusal = parameter_count(model.config), [], None
    if parameters is None:
        raise UserError(
            f"{model.name}: the parameters of the family `{model.config.get('model_type')}` are not counted from a configuration"
        )
    for changes in _layouts(model, room.slots):
        tried = deepcopy(tree)
        tried["rollout"] |= {"max_actors": room.slots // engine_width, "tensor_parallel": engine_width}
        tried["learner"] |= {"ranks": room.slots, **changes}
        for override in overrides:
            apply_override(tried, override, Recipe)
        try:
            recipe = Recipe.parse(tried, where=f"plan {model.name}")
            job, longest, _ = checked_run(recipe, f"plan {model.name}", room, (model.config, parameters))
            check(job, lambda: room)
            fitted = fit(longest, lambda: room)
        except UserError as error:
            refusal = error
            continue
        learner = fitted.job.recipe.learner
        tried["learner"] |= {key: value for key in FITTED if (value := getattr(learner, key)) is not False}
        found.append((_update_s(fitted.job.recipe, model, device, learner.max_micro_batch_tokens), DeviceRecipe(tried, fitted, room)))
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda one: one[0])[1]


def _layouts(model: Described, ranks: int) -> Iterator[JsonObject]:
    """Yield the ways in which learner ranks may share the model. Tensor parallelism stays inside a node."""
    from placement.memory import engine_widths

    widths = engine_widths(model.config, min(ranks, NODE)) or [1]
    for width, stage in itertools.product(widths, (1, 2, 3)):
        if ranks % width == 0 and not (width > 1 and stage == 3):
            yield {"zero_stage": stage, **({"tensor_parallel": width} if width > 1 else {})}


def _update_s(recipe: Recipe, model: Described, device: Device, micro_batch_tokens: int) -> float:
    """Predict the seconds of an update, with responses half as long as they may be. They only rank layouts."""
    from placement.catalog import catalog
    from placement.layouts import Layout
    from placement.speed.call_seconds import CallSeconds, CallWork
    from placement.speed.model_sizes import Model

    learner, rollout, prompts = recipe.learner, recipe.rollout, recipe.prompts
    layout: Layout = Layout(learner.ranks // learner.tensor_parallel, learner.tensor_parallel, zero_stage=learner.zero_stage)
    longest = recipe.longest_tokens(prompts.max_prompt_tokens)
    sequences = prompts.batch_prompts * rollout.samples_per_prompt
    work = CallWork(sequences, prompts.max_prompt_tokens / 2, rollout.max_tokens / 2, longest, recipe.algorithm.updates_per_step)
    seconds = CallSeconds(device, min(learner.ranks, NODE), catalog.values(catalog.read("phases")))
    return seconds.train_s(Model.from_config(model.name, model.config), work, layout, max(micro_batch_tokens, longest))
