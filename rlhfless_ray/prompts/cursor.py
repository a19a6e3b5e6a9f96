"""Select the next rows, in shuffled epochs that can be resumed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject

TITLES = {  # of what orders the rows
    "n_rows": "the number of training rows",
    "shuffle": "prompts.shuffle",
    "seed": "run.seed",
    "checksum": "the checksum of the training prompts",  # last, because a built-in task's rows follow from the others
}


def check_unchanged(state: Mapping[str, object], now: object, titles: Mapping[str, str]) -> None:
    """Raise UserError if one of these values is not as in a checkpoint's `state`: going on would repeat some rows and skip others."""
    for name, title in titles.items():
        if name in state and state[name] != getattr(now, name):
            raise UserError(
                f"resume: {title} was {state[name]} when the checkpoint was saved and is {getattr(now, name)} now; set it back, or start a "
                "new run"
            )


class Cursor:
    """Return row indices, `batch` at a time.

    Every epoch is a permutation derived from (seed, epoch). Batches continue across the end of an epoch, so every row is seen
    exactly once per epoch and every batch is full. A batch that spans two epochs may hold a row twice. With
    `stops_at_epoch_end` the last batch of an epoch holds only the rows that are left.
    """

    def __init__(self, n_rows: int, batch: int, shuffle: bool, seed: int, *, stops_at_epoch_end: bool = False, checksum: str = "") -> None:
        """`checksum`: of the rows' prompts in their order."""
        self.stops_at_epoch_end, self.checksum = stops_at_epoch_end, checksum
        self.n_rows, self.batch, self.shuffle, self.seed = n_rows, batch, shuffle, seed
        self._rows_taken = 0  # rows returned since the start
        self._permuted_epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Number of completed epochs, which is the epoch of the next row."""
        return self._rows_taken // self.n_rows

    @property
    def is_epoch_boundary(self) -> bool:
        """Whether the last row of an epoch was returned, and no row of the next one."""
        return self._rows_taken > 0 and self._rows_taken % self.n_rows == 0

    def next(self, count: int | None = None) -> list[int]:
        """Return the next `batch` or `count` row indices, or fewer at the end of an epoch with `stops_at_epoch_end`."""
        rows: list[int] = []
        wanted = self.batch if count is None else count
        while len(rows) < wanted:
            start = self._rows_taken % self.n_rows
            part = self._permutation(self.epoch)[start : start + wanted - len(rows)]
            rows += part.tolist()
            self._rows_taken += len(part)
            if self.stops_at_epoch_end and self._rows_taken % self.n_rows == 0:
                break
        return rows

    def rows_left(self, epochs: int) -> int:
        """Return the number of rows that are left of the first `epochs` epochs."""
        return max(0, epochs * self.n_rows - self._rows_taken)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch with `stops_at_epoch_end`."""
        return -(-self.n_rows // self.batch)

    def state(self) -> JsonObject:
        """Return the state for `restore`, ready for JSON."""
        return {"taken": self._rows_taken, **{name: getattr(self, name) for name in TITLES}}

    def check(self, state: JsonObject) -> None:
        """Raise UserError if the rows or their order are not those of `state`."""
        check_unchanged(state, self, TITLES)

    def has_same_rows(self, state: Mapping[str, object]) -> bool:
        """Return whether the rows are those of `state`, in whatever order."""
        return all(state.get(name) == getattr(self, name) for name in ("n_rows", "checksum"))

    def restore(self, state: JsonObject, *, check: bool = True) -> None:
        """Continue from `state`. The batch size may have changed. Raises UserError as `check` does, which may be left out."""
        if check:
            self.check(state)
        self._rows_taken = int(state["taken"])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._permuted_epoch:
            rng = np.random.default_rng([self.seed % 2**63, epoch])
            self._order = rng.permutation(self.n_rows) if self.shuffle else np.arange(self.n_rows)
            self._permuted_epoch = epoch
        return self._order
