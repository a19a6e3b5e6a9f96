"""How the learner's ranks may divide its state, where the recipe leaves it open: tensor parallelism, ZeRO stage and the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from rlhfless_ray.learn.model_checks import family_refusal, refusal
from rlhfless_ray.preflight.memory_needs import JobMemory, Settings
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.section import AutoCount, AutoStage

J = TypeVar("J", bound=JobMemory)


def divisions(job: JobMemory) -> Iterator[Settings]:
    """Yield settings for the tensor parallelism and the ZeRO stage that are `auto`, or none once if neither is.

    Less tensor parallelism comes first, then lower stages, because ranks exchange more with each. A single copy of the model has nothing
    to divide by a stage.
    """
    learner = job.recipe.learner
    for width in _widths(job):
        of_width = {"learner.tensor_parallel": width} if isinstance(learner.tensor_parallel, AutoCount) else {}
        if isinstance(learner.zero_stage, AutoStage):
            yield from ({**of_width, "learner.zero_stage": stage} for stage in _stages(job, width))
        elif width == 1 or learner.zero_stage < 3 or not of_width:
            yield of_width


def on_more_ranks(job: J, slots: int) -> J | None:
    """Return the job with twice the ranks to begin with, if their number is `auto` and there are so many slots."""
    ranks = job.recipe.learner.ranks
    return job.with_settings({"learner.ranks": AutoCount(2 * ranks)}) if isinstance(ranks, AutoCount) and 2 * ranks <= slots else None


def why_undivided(job: JobMemory) -> str:
    """Return why an automatic tensor parallelism is 1 on any number of ranks. Empty if it may be more."""
    if not isinstance(job.recipe.learner.tensor_parallel, AutoCount) or "policy" not in job.models:
        return ""
    why = family_refusal(job.models["policy"].config)
    return f"learner.tensor_parallel=1 (auto: {why})" if why else ""


def _widths(job: JobMemory) -> list[int]:
    learner = job.recipe.learner
    if not isinstance(learner.tensor_parallel, AutoCount):
        return [learner.tensor_parallel]
    if learner.sequence_parallel > 1 or "policy" not in job.models:
        return [1]
    config, wider = job.models["policy"].config, range(2, learner.ranks + 1)
    return [1, *(width for width in wider if learner.ranks % width == 0 and refusal(config, width) is None)]


def _stages(job: JobMemory, width: int) -> range:
    recipe, learner = job.recipe, job.recipe.learner
    least = 1 if recipe.policy.dtype == "bfloat16" or learner.optimizer_offload is True else 0
    has_slices = width > 1 or (isinstance(recipe, Recipe) and recipe.critic.tensor_parallel > 1)
    most = least if learner.ranks // width // learner.sequence_parallel < 2 else 2 if has_slices else 3
    return range(least, most + 1)
