"""Find the numbers of ranks among which a run with `learner.ranks: auto` chooses."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlhfless_ray.learn.rank_settings import auto_ranks
from rlhfless_ray.preflight.memory_check import shortage
from rlhfless_ray.preflight.memory_fit import is_small
from rlhfless_ray.preflight.memory_needs import Room, Settings
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.section import AutoCount


def rank_counts(job: RunMemory, find_room: Callable[[], Room], slots: int, before: int | None = None) -> list[int]:
    """Return the numbers of learner ranks that fit the slots and the memory: one if it is not `auto`.

    They double from the fewest that share a copy of the policy. The first is that of the checkpoint (`before`), if it is among them, and
    otherwise the fewest. None has more parts of a batch than a step has samples. `find_room` is called unless everything is small. If none
    fits, the fewest are returned, for `memory_check.check` to say why.
    """
    recipe, fewest = job.recipe, int(job.recipe.learner.ranks)
    if not isinstance(recipe.learner.ranks, AutoCount):
        return [fewest]
    samples = recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt
    most = max(fewest, min(slots, samples * fewest))
    counts = [fewest * 2**k for k in range(int(math.log2(most / fewest)) + 1)]
    jobs = {count: job.with_settings(settings_of(recipe, count)) for count in counts}
    if not all(is_small(need for room in one.rooms for need in one.peaks(room)) for one in jobs.values()):
        room = find_room()
        counts = [count for count, one in jobs.items() if room.bytes is None or shortage(one, room) is None] or [fewest]
    return sorted(counts, key=lambda count: (count != before, count))


def settings_of(recipe: Recipe, ranks: int) -> Settings:
    """Return settings with numbers instead of `auto`."""
    return {f"{name}.ranks": count for name, count in auto_ranks(recipe, ranks).items()}
