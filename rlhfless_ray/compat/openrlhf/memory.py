"""Check whether a machine has the memory that a command's models need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.resources import slots_here

if TYPE_CHECKING:
    from rlhfless_ray.compat.openrlhf.supervised import SupervisedTranslation
    from rlhfless_ray.compat.openrlhf.translate import Translation
    from rlhfless_ray.preflight.memory_needs import Room


def too_large(
    translation: Translation | SupervisedTranslation, environment: Mapping[str, str] = os.environ, there: Room | None = None
) -> str | None:
    """Return why the models do not fit this machine, or the devices `there`. None if they do, or if the command joins another cluster."""
    from rlhfless_ray.preflight.memory_check import check, check_ahead, job_of

    if translation.problem() or slots_here(translation.settings, environment, there) is None:
        return None
    try:
        if there is None:
            check_ahead(translation.recipe(), fetch=False)
        else:
            check(job_of(translation.recipe(), fetch=False), lambda: there)
    except UserError as error:
        return str(translation.by_flag(error))
    return None
