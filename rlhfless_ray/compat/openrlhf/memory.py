"""Estimate the device memory that a command's models need, and check whether this machine has it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.resources import slots_here
from rlhfless_ray.compat.openrlhf.translate import Translation

if TYPE_CHECKING:
    from rlhfless_ray.compat.openrlhf.supervised import SupervisedTranslation
    from rlhfless_ray.preflight.memory_needs import ModelSize, Need
    from rlhfless_ray.recipe import Recipe

COMMON_GB = 80  # memory of an A100 or H100
COMMON_BYTES = COMMON_GB * 2**30  # devices sold as 80 GB have 79.2 to 80 GiB


def memory_lines(translation: Translation) -> list[str]:
    """Describe each function's need of device memory. Empty if the models' sizes are not known on this machine."""
    return [f"{need.who} needs {need} on {_devices(need)}" for need in needs_of(translation)]


def needs_of(translation: Translation) -> list[Need]:
    from rlhfless_ray.preflight.memory_needs import device_needs

    recipe, models = _sized(translation)
    return device_needs(recipe, models) if recipe is not None else []


def width_note(translation: Translation) -> list[str]:
    """Say whether one common device can hold an engine for which the command requests several devices."""
    v = translation.values
    need = next((need for need in needs_of(translation) if need.is_engine), None)
    if v["vllm.tensor_parallel_size"] == 1 or need is None:
        return []
    holds = need.bytes <= need.share * COMMON_BYTES
    then = "holds it" if holds else "does not hold it: on such a device the run is refused before it starts"
    flag = v.spelled("vllm.tensor_parallel_size")
    return [f"{flag}: an engine needs {need} on {_devices(need)}, and one of {COMMON_GB} GB {then}"]


def _devices(need: Need) -> str:
    return "its device" if need.devices == 1 else f"each of its {need.devices} devices"


def too_large_here(translation: Translation, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why the models do not fit this machine. None if they do, or if the command runs on another cluster."""
    from rlhfless_ray.preflight.memory_check import check_ahead

    recipe, _ = _sized(translation)
    if recipe is None or slots_here(translation.settings, environment) is None:
        return None
    try:
        check_ahead(recipe, fetch=False)
    except UserError as error:
        return str(translation.by_flag(error))
    return None


def too_large_stage(translation: SupervisedTranslation, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why the models of a supervised stage do not fit this machine, as `too_large_here` does."""
    from rlhfless_ray.preflight.memory_check import local_room
    from rlhfless_ray.supervise.memory_check import check_stage

    if slots_here(translation.settings, environment) is None:
        return None
    recipe = translation.recipe()
    try:
        check_stage(recipe, lambda: local_room(recipe), fetch=False)
    except UserError as error:
        return str(translation.by_flag(error))
    return None


def _sized(translation: Translation) -> tuple[Recipe | None, dict[str, ModelSize]]:
    """Return the recipe of the honoured flags, or None if it is invalid, and its models' sizes."""
    from rlhfless_ray.preflight.memory_needs import models_of
    from rlhfless_ray.recipe import Recipe

    try:
        recipe = Recipe.parse(translation.tree)
    except UserError:  # `problem` reports it
        return None, {}
    return recipe, models_of(recipe, fetch=False)
