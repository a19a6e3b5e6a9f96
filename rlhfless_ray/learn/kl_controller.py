"""Control the KL coefficient from step to step. Controllers are immutable: `after` returns a new one. Their fields are their state."""

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
    """Steer the measured KL towards `target` (Ziegler et al. 2019, section 2.2, arXiv 1909.08593).

    β ← β·(1 + e·samples/horizon) with e = clip(KL/target - 1, -0.2, 0.2). `horizon` is in samples: the paper's gain of 0.1 per step
    of n samples is a horizon of 10·n.
    """

    coefficient: float
    target: float
    horizon: float = 10_000

    def after(self, kl: float, samples: int) -> AdaptiveKL:
        """Return the controller after a step of `samples` samples. `kl`: their mean KL; ignored if it is not finite."""
        if not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1 + error * samples / self.horizon))
