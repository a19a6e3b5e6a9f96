"""Check whether this machine has the memory that a command's models need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.resources import slots_here

if TYPE_CHECKING:
    from rlhfless_ray.compat.openrlhf.supervised import SupervisedTranslation
    from rlhfless_ray.compat.openrlhf.translate import Translation


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
