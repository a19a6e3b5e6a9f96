"""An exponential moving average of weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def ema_update(average: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    """Update average ← decay·average + (1 - decay)·weights in place, one tensor at a time (Polyak & Juditsky 1992).

    Call it once per optimizer step. Both mappings have the same names and shapes. Keep the average in float32: with a decay of
    0.992 a bfloat16 average stops changing once a weight is within half a percent of it. Raises ValueError for a decay outside
    [0, 1], and if the names differ.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"the decay is {decay}, must be from 0 to 1")
    if set(average) != set(weights):
        raise ValueError(f"in only one of average and weights: {sorted(set(average) ^ set(weights))[0]}")
    for name, mean in average.items():
        mean.lerp_(weights[name].to(device=mean.device, dtype=mean.dtype), 1 - decay)
