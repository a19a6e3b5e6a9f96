"""Learning-rate schedules by optimizer step. Pure functions with the names and values of transformers' `get_scheduler`."""

from __future__ import annotations

import math

POLYNOMIAL_END = 1e-7  # the rate that `polynomial` ends at


def rate(name: str, step: int, total: int, peak: float, warmup_share: float = 0.0, min_share: float = 0.0) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first) of `total`.

    Warm-up takes ceil(total · warmup_share) steps and begins at 0; `constant` has none. `min_share`: floor of
    `cosine_with_min_lr`, as a share of the peak.
    """
    warmup = math.ceil(total * warmup_share)
    if name == "constant":
        return peak
    if step < warmup:
        return peak * step / warmup
    if name == "constant_with_warmup":
        return peak
    if name == "inverse_sqrt":
        scale = warmup or 10_000
        return peak / math.sqrt((step + scale - warmup) / scale)
    done = (step - warmup) / max(1, total - warmup)
    if name == "linear":
        return peak * max(0.0, 1 - done)
    if name == "polynomial":
        return POLYNOMIAL_END + (peak - POLYNOMIAL_END) * (1 - done) if step <= total else POLYNOMIAL_END
    if name == "cosine_with_restarts" and done >= 1:
        return 0.0
    cosine = max(0.0, 0.5 * (1 + math.cos(math.pi * done)))
    return peak * (cosine * (1 - min_share) + min_share) if name == "cosine_with_min_lr" else peak * cosine
