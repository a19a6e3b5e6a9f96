"""How many preemptible instances there are over time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class InstanceCounts:
    """A step function that repeats. at_s (k,): ascending, from 0 on. count (k,): instances from then on. span_s: of one repetition."""

    at_s: np.ndarray
    count: np.ndarray
    span_s: float

    @classmethod
    def constant(cls, count: int) -> InstanceCounts:
        return cls(np.zeros(1), np.array([count]), math.inf)

    @property
    def most(self) -> int:
        return int(self.count.max())

    def at(self, time_s: float) -> int:
        return int(self.count[self._index(time_s)])

    def next_change(self, time_s: float) -> float:
        """Return when the number may change next, later than `time_s`. Infinite if it never does."""
        if math.isinf(self.span_s):
            return math.inf
        turns, i = time_s // self.span_s, self._index(time_s) + 1
        return float(turns * self.span_s + (self.at_s[i] if i < len(self.at_s) else self.span_s))

    def scaled(self, most: int) -> InstanceCounts:
        """Return the same course with at most this many instances."""
        return InstanceCounts(self.at_s, np.round(self.count * (most / max(1, self.most))).astype(int), self.span_s)

    def _index(self, time_s: float) -> int:
        within = time_s % self.span_s if math.isfinite(self.span_s) else time_s
        return int(np.searchsorted(self.at_s, within, side="right")) - 1
