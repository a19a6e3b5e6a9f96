"""The rows that a run has left: its cursor, the episodes' end, and how many groups filtering leaves a step short of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.types import Prompt

Pick = Callable[[int], Sequence[int]]  # number of prompts → their rows


@dataclass
class PromptSource:
    rows: Sequence[Prompt]
    cursor: Cursor
    dynamic_sampling: DynamicSampling
    episodes: int | None  # None: rows never end
    pick: Pick | None = None  # picks the rows in place of the cursor, which counts them all the same

    @property
    def missing(self) -> int:
        """Number of groups that the step lacks."""
        return self.dynamic_sampling.missing

    @property
    def is_used_up(self) -> bool:
        """Whether filtered groups have used up the last episode's prompts, maybe before the last step."""
        filters = self.dynamic_sampling.section.filter_range is not None
        return self.episodes is not None and filters and self.cursor.epoch >= self.episodes

    def draw(self, count: int, has_groups: bool) -> list[Prompt]:
        """Return the next prompts, fewer at the end of the last episode. `has_groups`: whether the step has any group without them."""
        if self.episodes is not None:
            left = self.cursor.rows_left(self.episodes)
            if not left and not has_groups and not self.dynamic_sampling.ready:
                left = self.missing  # filtering has dropped all groups of the last step, which has at least one
            count = min(count, left)
        return self._prompts(self.cursor.next(count))

    def redraw(self) -> list[Prompt]:
        """Return prompts in place of dropped groups, or none if the step is complete."""
        return self._prompts(self.dynamic_sampling.draw())

    def _prompts(self, rows: list[int]) -> list[Prompt]:
        if self.pick is not None and rows:
            count, rows = len(rows), [int(row) for row in self.pick(len(rows))]
            if len(rows) != count or not all(0 <= row < len(self.rows) for row in rows):
                raise UserError(f"session.admit: pick({count}) returned {rows}; expected {count} rows from 0 to {len(self.rows) - 1}")
        return [self.rows[i] for i in rows]
