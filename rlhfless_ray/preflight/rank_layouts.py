"""Find the layouts of the learner among which a run with `learner.ranks: auto` chooses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from rlhfless_ray.learn.rank_settings import RankLayout, auto_ranks, learner_settings
from rlhfless_ray.preflight.memory_check import DoesNotFit, shortage
from rlhfless_ray.preflight.memory_fit import fit, is_small
from rlhfless_ray.preflight.memory_needs import Room, Settings
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.recipe import LearnerConfig, Recipe
from rlhfless_ray.recipe.section import AutoCount


def rank_layouts(
    job: RunMemory, given: LearnerConfig, find_room: Callable[[], Room], slots: int, before: int | None = None
) -> dict[int, RankLayout]:
    """Return the learner's layouts that fit the slots and the memory, by their numbers of ranks: one if that is not `auto`.

    Numbers double from the fewest that share a copy of the policy. The first is that of the checkpoint (`before`), if it is among them, and
    otherwise the fewest. None has more parts of a batch than a step has samples. Each has a tensor parallelism and a ZeRO stage of its own
    where these are `auto` in the recipe (`given`): a single rank has no copy to share state with. `find_room` is called unless everything
    is small. If none fits, the fewest are returned, for `memory_check.check` to say why.
    """
    recipe, fewest = job.recipe, int(job.recipe.learner.ranks)
    layout = learner_settings(recipe).layout
    if not isinstance(recipe.learner.ranks, AutoCount):
        return {fewest: layout}
    find_room = functools.cache(find_room)
    samples = recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt
    most = max(fewest, min(slots, samples * fewest))
    counts = [fewest * 2**k for k in range(int(math.log2(most / fewest)) + 1)]
    left_open = {f"learner.{key}": getattr(given, key) for key in ("tensor_parallel", "zero_stage")}
    layouts = {}
    for count in counts:
        division = left_open if count > fewest else {}
        if (found := _fitted(job.with_settings(_numbers(recipe, count) | division), find_room)) is not None:
            layouts[count] = learner_settings(found.recipe).layout
    first = before if before in layouts else min(layouts, default=fewest)
    return {first: layouts.get(first, replace(layout, ranks=fewest)), **layouts}


def in_layout(job: RunMemory, layout: RankLayout) -> RunMemory:
    """Return the job with the learner in a layout, and the other groups whose number of ranks is `auto` on as many as they have then."""
    division = {"learner.tensor_parallel": layout.tensor_parallel, "learner.zero_stage": layout.zero_stage}
    return job.with_settings(_numbers(job.recipe, layout.ranks) | division)


def _numbers(recipe: Recipe, ranks: int) -> Settings:
    return {f"{name}.ranks": count for name, count in auto_ranks(recipe, ranks).items()}


def _fitted(job: RunMemory, find_room: Callable[[], Room]) -> RunMemory | None:
    """Return the job in the division that fits best, or None if its least memory is not there."""
    try:
        found = fit(job, find_room).job
    except DoesNotFit:
        return None
    if all(is_small(found.peaks(room)) for room in found.rooms):
        return found
    room = find_room()
    return found if room.bytes is None or shortage(found, room) is None else None
