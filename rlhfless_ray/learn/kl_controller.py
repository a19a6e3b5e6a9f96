"""The KL coefficient from step to step. Values: what a controller becomes is a new one, and its fields are all there is to
save."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class FixedKL:
    coefficient: float

    def after(self, kl: float, samples: int) -> FixedKL:
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """Steers the measured KL towards `target` (Ziegler et al. 2019, section 2.2, arXiv 1909.08593).

    β ← β·(1 + e·samples/horizon) with e = clip(KL/target - 1, -0.2, 0.2). `horizon` in samples (the paper's gain 0.1 per step
    of n samples is a horizon of 10·n). Raises ValueError when target or horizon is not positive.
    """

    coefficient: float
    target: float
    horizon: float = 10_000

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0):
            raise ValueError(f"KL target {self.target:g} and horizon {self.horizon:g} must be positive")

    def after(self, kl: float, samples: int) -> AdaptiveKL:
        """`kl`: mean KL of the step's samples, from one that is not finite nothing is learned; `samples`: how many they were."""
        if not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1 + error * samples / self.horizon))
