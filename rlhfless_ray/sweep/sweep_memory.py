"""How many runs of a sweep the memory holds at once.

The runs that work at the same time share the memory of the cores' nodes, and beside GPUs that of the host. A sweep is refused by lower
bounds alone, as each run is. `at_most: auto` goes by predicted peaks. Each run chooses its `auto` settings for an equal part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from placement import peak_memory
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.preflight.memory_check import DoesNotFit, check, job_of
from rlhfless_ray.preflight.memory_fit import fit
from rlhfless_ray.preflight.memory_needs import Room, gb
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.sweep.sweep_file import PlannedRun

AnyRecipe = Recipe | SupervisedRecipe


def check_memory(runs: Sequence[PlannedRun], at_most: int, room: Room) -> None:
    """Raise UserError if a run does not fit the memory, or if those that need most of it do not fit together, `at_most` of them."""
    least = []
    for run in runs:
        try:
            least.append(_least_bytes(run.recipe, room))
        except DoesNotFit as error:
            raise UserError(f"run {run.name}: {error}") from None
    there = room.shared_bytes
    if there is None or sum(largest := sorted(least, reverse=True)[:at_most]) <= there:
        return
    fitting = _most(lambda count: sum(largest[:count]) <= there, at_most)
    raise UserError(
        f"at_most: {len(largest)} runs at once need at least {gb(sum(largest))} of memory, the largest {gb(largest[0])}, and there are "
        f"{gb(there)}; set it to {fitting}"
    )


def most_runs(runs: Sequence[PlannedRun], room: Room, limit_to: int | None = None) -> tuple[int, str]:
    """Return how many runs work at once with `at_most: auto`, or up to `limit_to`, and why no more.

    Each needs a slot, and the predicted peaks of those that need most of the memory must fit together.
    """
    there, most = room.shared_bytes, max(1, min(len(runs), room.slots, limit_to or len(runs)))
    limit = f"as many as there are {'runs' if most == len(runs) else 'slots'}"

    def predicted(count: int) -> int:
        return sum(sorted((_predicted_bytes(run.recipe, room, count) for run in runs), reverse=True)[:count])

    if there is None:
        return most, f"{limit}; the memory is not known here"
    budget = peak_memory.USED_SHARE * there
    count = _most(lambda count: predicted(count) <= budget, most)
    if count == most:
        return count, limit
    more = gb(predicted(count + 1))
    return count, f"{count + 1} would take about {more} of memory together, more than {peak_memory.USED_SHARE:.0%} of {gb(there)}"


def with_part_of_memory(recipe: AnyRecipe, runs: int) -> AnyRecipe:
    """Return the recipe of one of `runs` runs at once, with its part of the memory unless it names one."""
    named = "memory_share" in recipe.cluster.model_fields_set
    return recipe if named else recipe.with_settings({"cluster.memory_share": 1 / runs})


def _most(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to `most` that fits, at least 1."""
    return next((count for count in range(most, 1, -1) if fits(count)), 1)


def _least_bytes(recipe: AnyRecipe, room: Room) -> int:
    """Return a lower bound of the shared memory that a run takes at its peak, 0 if it is not known. Raises DoesNotFit.

    On a GPU functions take turns, also those of several runs, so only the check of the run itself counts.
    """
    job = job_of(recipe)
    check(job, lambda: room)
    return 0 if room.on_gpu else max((need.bytes for need in job.least(room) if not need.alone), default=0)


def _predicted_bytes(recipe: AnyRecipe, room: Room, count: int) -> int:
    """Predict the shared memory that one of `count` runs takes at its peak, where every text is as long as it may be.

    A policy whose size is not known yet is made from scratch and small, so its processes count alone.
    """
    room = replace(room, slots=max(1, room.slots // count))
    job = job_of(with_part_of_memory(recipe, count)).with_longest_texts()
    needs = []
    if "policy" in job.models:
        try:
            needs = fit(job, lambda: room).job.peaks(room)
        except DoesNotFit:  # with texts of this length; the run itself knows how long they are
            needs = job.peaks(room)
    return max((need.bytes for need in needs if (need.on_host if room.on_gpu else not need.alone)), default=job.imports_bytes)
