"""Past response lengths of each prompt: exponentially weighted mean and spread of log length."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from placement.plain_data import JsonObject

COLUMNS = 4  # mean of log length, its effective samples, variance of log length, its degrees of freedom


class LengthHistory:
    """A bounded table of prompts. Those unvisited for longest are forgotten first. float32, so that a state is exact."""

    def __init__(self, weight: float, most: int) -> None:
        """weight: of the newest visit, in (0, 1]. most: number of prompts remembered (20 bytes each in a state)."""
        self.weight, self.most = weight, most
        self.rows: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, prompts: Sequence[int]) -> np.ndarray:
        """Return (n, 4) rows of the table; NaN for prompts never seen."""
        unseen = np.full(COLUMNS, np.nan, np.float32)
        return np.array([self.rows.get(int(p), unseen) for p in prompts], np.float64).reshape(-1, COLUMNS)

    def visit(self, prompts: Sequence[int], means: np.ndarray, counts: np.ndarray, squares: np.ndarray) -> None:
        """Add a step's groups (n,): mean of log length, samples, and sum of squares around the mean."""
        w = self.weight
        for i, prompt in enumerate(prompts):
            old = self.rows.pop(int(prompt), None)
            mean, count, square = float(means[i]), float(counts[i]), float(squares[i])
            freedom = count - 1
            variance = square / freedom if freedom > 0 else 0.0
            if old is not None:
                before = old.astype(float)
                mean = (1 - w) * before[0] + w * mean
                # the variance of a weighted mean is the sum of squared weights over the counts
                count = 1 / ((1 - w) ** 2 / before[1] + w**2 / count)
                kept = (1 - w) * before[3]
                if freedom + kept > 0:
                    variance = (kept * before[2] + freedom * variance) / (freedom + kept)
                freedom += kept
            self.rows[int(prompt)] = np.array([mean, count, variance, freedom], np.float32)
        while len(self.rows) > self.most:
            del self.rows[next(iter(self.rows))]

    def state(self) -> JsonObject:
        table = np.array(list(self.rows.values()), "<f4").reshape(-1, COLUMNS)
        keys = np.fromiter(self.rows, "<i8", len(self.rows))
        return {"prompts": base64.b64encode(keys.tobytes()).decode(), "table": base64.b64encode(table.tobytes()).decode()}

    def restore(self, state: JsonObject) -> None:
        keys = np.frombuffer(base64.b64decode(state["prompts"]), "<i8")
        table = np.frombuffer(base64.b64decode(state["table"]), "<f4").reshape(-1, COLUMNS).astype(np.float32)
        self.rows = {int(key): row for key, row in zip(keys, table, strict=True)}
