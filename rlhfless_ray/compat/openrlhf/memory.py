"""Estimate the device memory that a command's models need, and check whether this machine has it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.resources import slots_here

if TYPE_CHECKING:
    from rlhfless_ray.compat.openrlhf.supervised import SupervisedTranslation
    from rlhfless_ray.compat.openrlhf.translate import Translation
    from rlhfless_ray.preflight.memory_needs import Need

COMMON_GB = 80  # memory of an A100 or H100
COMMON_BYTES = COMMON_GB * 2**30  # devices sold as 80 GB have 79.2 to 80 GiB


def memory_lines(translation: Translation) -> list[str]:
    """Describe each function's need of device memory. Empty if the models' sizes are not known on this machine."""
    return [f"{need.who} needs {need} on {need.where}" for need in needs_of(translation)]


def needs_of(translation: Translation) -> list[Need]:
    """Return the least needs on GPUs. Empty if the honoured flags are no valid recipe."""
    from rlhfless_ray.preflight.memory_check import job_of
    from rlhfless_ray.preflight.memory_needs import GPU, Room

    if translation.problem():
        return []
    return job_of(translation.recipe(), fetch=False).least(Room(GPU, 1, None))


def width_note(translation: Translation) -> list[str]:
    """Say whether one common device can hold an engine for which the command requests several devices."""
    v = translation.values
    need = next((need for need in needs_of(translation) if need.is_engine), None)
    if v["vllm.tensor_parallel_size"] == 1 or need is None:
        return []
    holds = need.bytes <= need.share * COMMON_BYTES
    then = "holds it" if holds else "does not hold it: on such a device the run is refused before it starts"
    flag = v.spelled("vllm.tensor_parallel_size")
    return [f"{flag}: an engine needs {need} on {need.where}, and one of {COMMON_GB} GB {then}"]


def too_large_here(translation: Translation | SupervisedTranslation, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why the models do not fit this machine. None if they do, or if the command runs on another cluster."""
    from rlhfless_ray.preflight.memory_check import check_ahead

    if translation.problem() or slots_here(translation.settings, environment) is None:
        return None
    try:
        check_ahead(translation.recipe(), fetch=False)
    except UserError as error:
        return str(translation.by_flag(error))
    return None
