"""Mean and deviation of a reward model's outputs, as its config.json has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhfless_ray.common.errors import UserError


def output_scale(config: Mapping[str, Any], where: str, asked_by: str) -> tuple[float, float]:
    """Return the `mean` and `std` of a model's config; 0 and 1 where it has none, as OpenRLHF does.

    Args:
        config: The content of config.json.
        where: Recipe key that names the folder, for the message.
        asked_by: Recipe key that asks for the scale.

    Raises:
        UserError: They are not numbers, or the std is not positive.
    """
    found = config.get("mean", 0.0), config.get("std", 1.0)
    try:
        mean, deviation = map(float, found)
    except (TypeError, ValueError):
        mean = deviation = math.nan
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        raise UserError(f"{where}: {asked_by} needs finite numbers as mean and std in its config.json, which has {found}")
    if not deviation > 0:
        raise UserError(f"{where}: {asked_by} divides by the std in its config.json, which is {deviation:g}")
    return mean, deviation
