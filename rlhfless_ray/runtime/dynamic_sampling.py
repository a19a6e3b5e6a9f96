"""Dynamic sampling: groups that teach nothing are left out of a step, and other prompts answered in their place (Yu et al. 2025,
DAPO, section 3.2, arXiv 2503.14476)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.learn.group_filter import kept_groups
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Completion, Prompt, Sample

Group = list[Sample]
PLAIN = ("sample", "text", "reward", "error", "score", "extra_logs", "turns")  # of a sample, as they are in a checkpoint


class DynamicSampling:
    """`begin` → (`add` → `draw`) … → `take`, once a step. Groups that pass and find no place in it are kept for the next one."""

    def __init__(self, recipe: Recipe, cursor: Cursor) -> None:
        """Does nothing to a step where `algorithm.filter_range` is None."""
        self.section, self.cursor = recipe.algorithm, cursor
        self.batch, self.count = recipe.prompts.batch_prompts, recipe.rollout.samples_per_prompt
        self.ready: list[Group] = []  # that passed and were not learned from yet, in the order of their prompts
        self.begin()

    @property
    def first(self) -> int:
        """Prompts that a step begins with."""
        return self.batch - len(self.ready)

    def begin(self) -> None:
        self.left_over = len(self.ready)
        self.means: list[float] = []  # mean scores of the groups that were dropped in this step
        self.dropped: list[Sample] = []
        self.drawn = self.rounds = self.in_vain = 0

    def add(self, samples: list[Sample]) -> None:
        """The scored responses of a round, whole groups in the order of their prompts. Raises RunError where nothing has passed
        for too long."""
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
                self.in_vain = 0
            else:
                self.dropped += group
                self.means += [float(row[np.isfinite(row)].mean())] if np.isfinite(row).any() else []
                self.in_vain += 1
        if self.in_vain >= self.section.filter_patience * self.batch:
            seen = f"from {min(self.means):g} to {max(self.means):g}" if self.means else "unknown"
            raise RunError(
                f"algorithm.filter_range: of {self.in_vain} prompts in a row (algorithm.filter_patience {self.section.filter_patience} × "
                f"prompts.batch_prompts) none has responses whose mean score lies between {low:g} and {high:g}; their means are "
                f"{seen}; take other prompts, another reward or a wider range"
            )

    def draw(self) -> list[int]:
        """Rows of the prompts to be answered next, none where the step has all its groups. Where episodes end the batches, the last
        of one has the groups that it has, one at least."""
        missing = self.batch - len(self.ready)
        if missing <= 0 or (self.ready and self.cursor.stops_at_epoch_end and self.cursor.is_epoch_boundary):
            return []
        most = 2 * self.batch - 1 - len(self.ready)  # what is left over leaves the next step a prompt to begin with
        return self.cursor.next(min(math.ceil(missing * self.section.filter_draw), most))

    def take(self) -> list[Sample]:
        """The step's samples; those that are left over stay."""
        mine, self.ready = self.ready[: self.batch], self.ready[self.batch :]
        return [
            replace(s, sample=n, completion=replace(s.completion, key=place * self.count + n))
            for place, group in enumerate(mine)
            for n, s in enumerate(group)
        ]

    def fill(self, samples: list[Sample], answer: Callable[[list[int]], list[Sample]]) -> list[Sample]:
        """A step's samples from those of its first round; `answer`: scored responses to the prompts of these rows."""
        if self.section.filter_range is None:
            return samples
        self.begin()
        self.add(samples)
        while rows := self.draw():
            self.add(answer(rows))
        return self.take()

    def metrics(self) -> dict[str, Any]:
        """Of the step that was filled last."""
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

    def state(self) -> list[dict[str, Any]]:
        """The samples that are left over, as JSON."""
        return [_as_json(sample) for group in self.ready for sample in group]

    def restore(self, state: list[dict[str, Any]], prompts: list[Prompt]) -> None:
        """`prompts`: those that rows are numbers of. The last ones go that a smaller batch has no place for."""
        samples = [_of_json(row, prompts) for row in state]
        groups = [samples[start : start + self.count] for start in range(0, len(samples), self.count)]
        self.ready = [group for group in groups if len(group) == self.count][: self.batch - 1]


def _score(sample: Sample) -> float:
    """What a group is judged by, NaN where the sample has none."""
    score = sample.reward if sample.score is None else sample.score
    return math.nan if score is None else score


def _as_json(sample: Sample) -> dict[str, Any]:
    completion = asdict(sample.completion)
    completion |= {name: completion[name].tolist() for name in ("token_ids", "logprobs")}
    mask = None if sample.action_mask is None else sample.action_mask.tolist()
    return {"row": sample.prompt.index, "completion": completion, "action_mask": mask, **{name: getattr(sample, name) for name in PLAIN}}


def _of_json(row: dict[str, Any], prompts: list[Prompt]) -> Sample:
    """The same sample: float32 survives JSON's decimals."""
    told = row["completion"]
    told |= {
        "token_ids": np.array(told["token_ids"], np.int32),
        "logprobs": np.array(told["logprobs"], np.float32),
        "versions": tuple((version, tokens) for version, tokens in told["versions"]),
    }
    mask = None if row["action_mask"] is None else np.array(row["action_mask"], bool)
    sample = Sample(prompts[row["row"]], completion=Completion(**told), action_mask=mask, **{name: row[name] for name in PLAIN})
    return replace(sample, turns=tuple((who, text) for who, text in sample.turns))
