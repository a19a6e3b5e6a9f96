"""The groups that a step generates, and those that continue in the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from placement.forecast.forecaster import Scenarios
from placement.scaling.partial_rollout import choose_groups, settled_groups
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.step.requests import make_request
from rlhfless_ray.types import UNFINISHED, Completion, Group, Request, Sample, SampleId


class RolloutBatch:
    """The groups that a step generates, those of earlier steps first, and the groups that it trains on.

    Requests have the order of the groups: keys `g * count` to `g * count + count - 1` are those of group g. `made` (n,): tokens of each
    response so far. `unfinished` (n,): bool.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        step: int,
        quota: int,
        max_lag: int,
        count: int,
        per_step: int | None = None,
        made_requests: Sequence[Request] = (),
        *,
        cuts: bool = True,
    ) -> None:
        """`quota`: number of groups to choose. `per_step`: number of groups that each later step trains on, if that differs.

        `made_requests`: those of the same groups, if they were made before. `cuts`: whether unfinished responses go on in the next step.
        """
        self.cuts = cuts
        self.groups, self.step, self.quota, self.max_lag, self.count = groups, step, min(quota, len(groups)), max_lag, count
        self.per_step, self.made_requests = per_step or self.quota, made_requests
        self.last_steps = [group.begun + max_lag for group in groups]
        self.chosen: list[int] | None = None
        self.completed: list[int] = []  # complete groups, in the order of completion
        self.missing, self.seen = [count] * len(groups), 0  # unfinished responses of each group; finished keys that are counted
        self.forced = 0  # groups whose age forced the step to wait for them although enough others were complete
        self.ids = [name for group in groups for name in group.ids(count)]
        self.group_of = np.repeat(np.arange(len(groups)), count).tolist()  # by key
        key_of = {name: key for key, name in enumerate(self.ids)}
        self.samples = {key_of[sample.id]: sample for group in groups for sample in group.samples}
        self.made, self.unfinished = np.zeros(len(groups) * count, np.int64), np.ones(len(groups) * count, bool)
        for key, sample in self.samples.items():
            self.made[key] = len(sample.completion.token_ids)
            self.unfinished[key] = sample.completion.finish_reason == UNFINISHED

    def requests(self, recipe: Recipe) -> list[Request]:
        """Return all requests, also of finished responses. Their seeds are those of the step in which their group began."""
        if not self.made_requests:
            self.made_requests = [
                make_request(recipe, key, self.groups[g].prompt, recipe.rollout.temperature, name)
                for key, (g, name) in enumerate(zip(self.group_of, self.ids, strict=True))
            ]
        return list(self.made_requests)

    def ids_of(self, group: int) -> list[SampleId]:
        """Return the names of a group's responses."""
        return self.ids[group * self.count :][: self.count]

    @property
    def is_new(self) -> bool:
        """Whether it begins now, as a whole."""
        return not self.cuts and not self.samples

    @property
    def is_complete(self) -> bool:
        """Whether no response of its groups is missing."""
        return not self.unfinished.any()

    def before(self) -> dict[int, Completion]:
        """Return the responses of earlier steps, finished or not, by key."""
        return {key: sample.completion for key, sample in self.samples.items()}

    def is_enough(self, finished: Collection[int]) -> bool:
        """Return whether enough groups are complete, and choose them once they are.

        `finished`: keys in the order of completion, which later calls may only extend.
        """
        new = self._count(finished)
        if self.chosen is None and new and len(self.completed) >= self.quota:
            self.chosen = choose_groups(self.last_steps, self.completed, self.step, self.quota, self.per_step)
            if self.chosen is not None:
                self.forced = len(set(self.chosen) - set(self.completed[: self.quota]))
        return self.chosen is not None

    def _count(self, finished: Collection[int]) -> bool:
        """Add the groups that are complete by now. Returns whether there are any new ones."""
        before = len(self.completed)
        for key in islice(finished, self.seen, None) if len(finished) > self.seen else ():  # skipping costs time as well
            self.seen += 1
            group = self.group_of[key]
            self.missing[group] -= 1
            if not self.missing[group]:
                self.completed.append(group)
        return len(self.completed) > before

    def settled(self) -> list[int]:
        """Return the complete groups that the step trains on whatever else becomes complete. `is_enough` counts the complete groups."""
        return settled_groups(self.last_steps, self.completed, self.step, self.quota, self.per_step)

    def until_enough(self, left: np.ndarray) -> float:
        """Return the tokens until enough groups are complete if all responses decode at the same speed. `left` (n,): of each response."""
        ends = left.reshape(len(self.groups), self.count).max(1)
        due = ends[np.array(self.last_steps) <= self.step]
        return float(max(np.sort(ends)[self.quota - 1], due.max(initial=0.0)))

    def join(self, new: Iterable[Sample], unfinished: Iterable[Completion]) -> list[Sample]:
        """Return all samples in the order of their keys: earlier ones, `new` finished ones, and `unfinished` ones of this rollout."""
        by_id = {sample.id: sample for sample in [*self.samples.values(), *new]}
        for completion in unfinished:
            name = self.ids[completion.key]
            by_id[name] = Sample(self.groups[self.group_of[completion.key]].prompt, name, completion)
        return [by_id[name] for name in self.ids if name in by_id]

    def with_samples(self, samples: Sequence[Sample]) -> list[Group]:
        """Return the groups with these samples, which must be in the order of their keys."""
        return [replace(group, samples=tuple(samples[g * self.count :][: self.count])) for g, group in enumerate(self.groups)]

    def after(self, samples: Sequence[Sample]) -> RolloutBatch:
        """Return the batch of a rollout that continues in the same step, from these samples."""
        return RolloutBatch(
            self.with_samples(samples), self.step, self.quota, self.max_lag, self.count, self.per_step, self.made_requests, cuts=self.cuts
        )

    def forecast_work(self, forecast: Scenarios) -> np.ndarray:
        """Return (n, S) tokens that this rollout will add to each response, at least 1. `forecast`: of whole responses.

        All responses are assumed to decode at the same speed until `quota` groups are complete.
        """
        left = forecast.revise(self.made, np.where(self.unfinished, np.nan, self.made)) - self.made[:, None]
        ends = np.sort(left.reshape(len(self.groups), self.count, -1).max(1), axis=0)[self.quota - 1]
        return np.clip(left, 1.0, np.maximum(1.0, ends))
