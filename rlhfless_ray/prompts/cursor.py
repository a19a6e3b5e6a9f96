"""Which rows come next: shuffled epochs that can be resumed."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhfless_ray.errors import UserError


class Cursor:
    """Hands out row indices, `batch` at a time.

    Every epoch is a permutation that follows from (seed, epoch). Batches run across the end of an epoch, so every row is
    seen exactly once per epoch and every batch is full; a batch that spans two epochs may hold a row of each twice. With
    `ends` a batch ends with its epoch instead, whose last one has the rows that are left.
    """

    def __init__(self, n_rows: int, batch: int, shuffle: bool, seed: int, *, ends: bool = False) -> None:
        if n_rows < 1 or batch < 1:
            raise ValueError("n_rows and batch must be at least 1")
        self.ends = ends
        self.n_rows, self.batch, self.shuffle, self.seed = n_rows, batch, shuffle, seed
        self._taken = 0  # rows handed out since the start
        self._order_epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Epochs completed, which is the epoch of the next row."""
        return self._taken // self.n_rows

    @property
    def at_border(self) -> bool:
        """Whether an epoch was handed out to its last row and no row of the next one."""
        return self._taken > 0 and self._taken % self.n_rows == 0

    def next(self, count: int | None = None) -> list[int]:
        """The next `batch` row indices, or `count`; fewer at the end of an epoch that ends its batches."""
        rows: list[int] = []
        wanted = self.batch if count is None else count
        while len(rows) < wanted:
            start = self._taken % self.n_rows
            part = self._permutation(self.epoch)[start : start + wanted - len(rows)]
            rows += part.tolist()
            self._taken += len(part)
            if self.ends and self._taken % self.n_rows == 0:
                break
        return rows

    @property
    def batches_per_epoch(self) -> int:
        """Of an epoch that ends its batches."""
        return -(-self.n_rows // self.batch)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON."""
        return {"taken": self._taken, "n_rows": self.n_rows, "shuffle": self.shuffle, "seed": self.seed}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; the batch size may have changed since.

        Raises UserError when the rows or their order are not the ones the state belongs to.
        """
        for name, title in (("n_rows", "the number of training rows"), ("shuffle", "prompts.shuffle"), ("seed", "run.seed")):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"resume: {title} was {state[name]} when the checkpoint was saved and is {getattr(self, name)} now; "
                    "set it back, or start a new run"
                )
        self._taken = int(state["taken"])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._order_epoch:
            rng = np.random.default_rng([self.seed % 2**63, epoch])
            self._order = rng.permutation(self.n_rows) if self.shuffle else np.arange(self.n_rows)
            self._order_epoch = epoch
        return self._order
