"""Read the mean and standard deviation of a reward model's outputs from its config.json."""

from __future__ import annotations

import math

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject


def output_scale(config: JsonObject, where: str, asked_by: str) -> tuple[float, float]:
    """Return the `mean` and `std` of a model's config; by default 0 and 1, as in OpenRLHF.

    Args:
        config: The content of config.json.
        where: Recipe key that names the folder, for the message.
        asked_by: Recipe key that requires the scale, for the message.

    Raises:
        UserError: They are not numbers, or the std is not positive.
    """
    scale = config.get("mean", 0.0), config.get("std", 1.0)
    try:
        mean, deviation = map(float, scale)
    except (TypeError, ValueError):
        mean = deviation = math.nan
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        raise UserError(f"{where}: {asked_by} needs finite numbers as mean and std in its config.json, which has {scale}")
    if not deviation > 0:
        raise UserError(f"{where}: {asked_by} divides by the std in its config.json, which is {deviation:g}")
    return mean, deviation
