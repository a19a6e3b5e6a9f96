"""Dynamic sampling: drop groups without a learning signal, and generate responses to other prompts instead.

Yu et al. 2025, DAPO, section 3.2, arXiv 2503.14476.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.group_filter import kept_groups
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.session.sample_state import as_json, from_json
from rlhfless_ray.types import Prompt, SampleId, Scored


class DynamicSampling:
    """Filter the groups of a step, see `fill`. Surplus groups that pass are kept for the next step."""

    def __init__(self, recipe: Recipe, cursor: Cursor) -> None:
        """With `algorithm.filter_range` None, steps are left as they are."""
        self.section, self.cursor = recipe.algorithm, cursor
        self.batch, self.count = recipe.prompts.batch_prompts, recipe.rollout.samples_per_prompt
        self.ready: list[list[Scored]] = []  # groups that passed and are not used yet, in the order of their prompts
        self.begin()

    @property
    def missing(self) -> int:
        """Number of groups that the step lacks."""
        return self.batch - len(self.ready)

    def begin(self) -> None:
        self.left_over = len(self.ready)
        self.means: list[float] = []  # mean scores of the groups dropped in this step
        self.dropped: list[Scored] = []
        self.drawn = self.rounds = self.failed_in_a_row = 0

    def add(self, samples: list[Scored]) -> None:
        """Add the scored responses of a round, whole groups in the order of their prompts.

        Raises RunError if no group has passed for too long.
        """
        assert self.section.filter_range is not None
        low, high = self.section.filter_range
        groups = [samples[start : start + self.count] for start in range(0, len(samples), self.count)]
        scores = np.array([[_score(s) for s in group] for group in groups], float).reshape(-1, self.count)
        passed = kept_groups(scores, low, high)
        self.rounds += 1
        self.drawn += len(groups)
        for group, row, passes in zip(groups, scores, passed, strict=True):
            if passes:
                self.ready.append(group)
                self.failed_in_a_row = 0
            else:
                self.dropped += group
                self.means += [float(row[np.isfinite(row)].mean())] if np.isfinite(row).any() else []
                self.failed_in_a_row += 1
        if self.failed_in_a_row >= self.section.filter_patience * self.batch:
            seen = f"from {min(self.means):g} to {max(self.means):g}" if self.means else "unknown"
            raise RunError(
                f"algorithm.filter_range: of {self.failed_in_a_row} prompts in a row (algorithm.filter_patience "
                f"{self.section.filter_patience} × prompts.batch_prompts) none has responses whose mean score lies between {low:g} and "
                f"{high:g}; their means are {seen}; take other prompts, another reward or a wider range"
            )

    def draw(self) -> list[int]:
        """Return the rows of the next prompts, or none if the step is complete.

        If batches end with the episode, its last step may have fewer groups, but at least one.
        """
        missing = self.missing
        if missing <= 0 or (self.ready and self.cursor.stops_at_epoch_end and self.cursor.is_epoch_boundary):
            return []
        max_prompts = 2 * self.batch - 1 - len(self.ready)  # so that surplus groups leave the next step at least one prompt
        return self.cursor.next(min(math.ceil(missing * self.section.filter_draw), max_prompts))

    def take(self) -> list[Scored]:
        """Return the step's samples. Surplus groups are kept."""
        mine, self.ready = self.ready[: self.batch], self.ready[self.batch :]
        return [sample for group in mine for sample in group]

    def fill(self, samples: list[Scored], next_round: Callable[[], list[Scored]]) -> list[Scored]:
        """Return a step's samples, given those of its first round. `next_round`: returns those of the next round, or none at the end."""
        if self.section.filter_range is None:
            return samples
        self.begin()
        self.add(samples)
        while new := next_round():
            self.add(new)
        return self.take()

    def metrics(self) -> JsonObject:
        """Return metrics of the last step."""
        if self.section.filter_range is None:
            return {}
        dropped = len(self.dropped) // self.count
        return {
            "filter/pass_percent": 100 * (1 - dropped / self.drawn),
            "filter/prompts": self.drawn,
            "filter/dropped_prompts": dropped,
            "filter/rounds": self.rounds,
            "filter/left_over": len(self.ready),
            "filter/taken_over": self.left_over,
            "filter/dropped_tokens": sum(len(s.completion.token_ids) for s in self.dropped),
            "filter/dropped_score_mean": float(np.mean(self.means)) if self.means else None,
        }

    # ---- state ------------------------------------------------------------------------------------------------

    def state(self) -> list[list[JsonObject]]:
        """Return the surplus groups as JSON-serialisable values."""
        return [[as_json(sample) for sample in group] for group in self.ready]

    def restore(self, state: Sequence[list[JsonObject] | JsonObject], prompts: list[Prompt]) -> None:
        """Restore surplus groups, or their samples as older versions saved them. `prompts`: by row.

        Groups beyond the batch size, which may be smaller now, and of another size than now are dropped.
        """
        groups: dict[SampleId, list[Scored]] = {}
        for one in state:
            read = [from_json(row, prompts) for row in (one if isinstance(one, list) else [one])]
            samples = [sample for sample in read if isinstance(sample, Scored)]  # which all surplus samples are
            groups.setdefault(samples[0].id.group(self.count), []).extend(samples)
        self.ready = [group for group in groups.values() if len(group) == self.count][: self.batch - 1]


def _score(sample: Scored) -> float:
    """Return the score by which groups are filtered, NaN if the sample has none."""
    score = sample.reward if sample.score is None else sample.score
    return math.nan if score is None else score
