"""The decode steps of engines as a table of numbers: engines report thousands a second to one driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from rlhfless_ray.types import EngineStep

COLUMNS = (
    "running",
    "new_tokens",
    "context_tokens",
    "seconds",
    "drafted",
    "accepted",
    "draft_s",
    "work_s",
    "model_drafted",
    "model_accepted",
)


class EngineSteps:
    """Step records. A record is made when it is read."""

    def __init__(self, steps: Iterable[EngineStep] = ()) -> None:
        rows = [
            (s.running, s.new_tokens, s.context_tokens, s.seconds, s.drafted, s.accepted, s.draft_s, s.work_s, *s.by_model) for s in steps
        ]
        self.table = self._buffer = np.array(rows, float).reshape(-1, len(COLUMNS))  # the buffer doubles when it is full

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[EngineStep]:
        return iter(self.newest(len(self)))

    def newest(self, count: int) -> list[EngineStep]:
        """Return the last records."""
        rows = self.table[max(0, len(self) - count) :].tolist()
        return [
            EngineStep(int(r), int(n), int(c), seconds, int(d), int(a), draft_s, (int(md), int(ma)), work_s)
            for r, n, c, seconds, d, a, draft_s, work_s, md, ma in rows
        ]

    def column(self, name: str) -> np.ndarray:
        """Return a number of every step by its name in `COLUMNS`."""
        return self.table[:, COLUMNS.index(name)]

    def token_s(self) -> np.ndarray:
        """Return `EngineStep.token_s` of every step."""
        running, accepted = self.column("running"), self.column("accepted")
        return np.where(accepted > 0, self.column("seconds") * running / np.maximum(running + accepted, 1), self.column("seconds"))

    def extend(self, more: EngineSteps) -> None:
        size = len(self) + len(more)
        if size > len(self._buffer):
            self._buffer = np.concatenate([self.table, np.empty((size, len(COLUMNS)))])
        self._buffer[len(self) : size] = more.table
        self.table = self._buffer[:size]
