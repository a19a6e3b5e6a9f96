"""Choose the settings of a job that are `auto`, and the size of engines' KV caches on CPU, so that the predicted peaks fit the memory."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

from placement.speed.roofline import FEW_SEQUENCES
from rlhfless_ray.preflight.job_memory import JobMemory
from rlhfless_ray.preflight.memory_check import DoesNotFit
from rlhfless_ray.preflight.need import GPU, Need, Room, gb
from rlhfless_ray.preflight.run_memory import SURE_SEQUENCES, RunMemory
from rlhfless_ray.preflight.update_fit import Fit, J, fit_update, is_small, used_memory_share
from rlhfless_ray.recipe.rollout_sections import DEFAULT_KV_MB

GROWN_KV_SHARE = 0.1  # largest share of the memory that settings may take for all KV caches beyond 256 MB each


@overload
def fit(job: RunMemory, find_room: Callable[[], Room]) -> Fit[RunMemory]: ...


@overload
def fit(job: J, find_room: Callable[[], Room]) -> Fit[J]: ...


def fit(job: JobMemory, find_room: Callable[[], Room]) -> Fit[Any]:
    """Choose the settings that are `auto`, see `fit_update`."""
    find_room = functools.cache(find_room)
    if not isinstance(job, RunMemory):
        return fit_update(job, find_room)
    found = (_fit_with_kv if job.recipe.rollout.kv_cache_mb == "auto" else fit_update)(job, find_room)
    if is_small(found.job.peaks_with(job.rooms[0], engines_keep=True)):
        return found
    room = find_room()
    kept = [need for need in found.job.peaks_with(room, engines_keep=True) if need.of_update]
    too_much = room.first_without_room(kept, used_memory_share(job, room)) is not None
    return replace(found, give_back_at_once=too_much and not room.on_gpu)


def _fit_with_kv(job: RunMemory, find_room: Callable[[], Room]) -> Fit[RunMemory]:
    """Choose the settings that are `auto`, where the size of the KV cache is one of them, see `fit_update`."""
    whole, first, least = _kv_sizes(job)
    try:
        found = fit_update(_with_kv(job, first), find_room)
        is_short = bool(found.note) and first != least and not find_room().on_gpu
    except DoesNotFit:
        if first == least:
            raise
        is_short = True
    if is_short:
        found = fit_update(_with_kv(job, least), find_room)
    return _with_larger_kv(found, whole, find_room)


def _with_kv(job: RunMemory, mb: int) -> RunMemory:
    return job.with_settings({"rollout.kv_cache_mb": mb})


def _kv_sizes(job: RunMemory) -> tuple[int, int, int]:
    """Return sizes of an engine's KV cache in MB: for a whole step, for the choice of the other settings, and the least."""
    evaluate = job.recipe.evaluate
    evaluated = min(evaluate.prompts * evaluate.samples_per_prompt, job.recipe.rollout.max_running)
    step = job.kv_mb(_sequences_at_once(job))
    if not step:
        return DEFAULT_KV_MB, DEFAULT_KV_MB, DEFAULT_KV_MB
    # an evaluation of more prompts than a step has gets no more than the default for it
    whole = max(step, min(DEFAULT_KV_MB, job.kv_mb(evaluated)))
    least = min(whole, job.kv_mb(SURE_SEQUENCES))
    return whole, min(whole, max(least, DEFAULT_KV_MB)), least


def _sequences_at_once(job: RunMemory) -> int:
    """Return how many sequences of a step an engine holds if it has all of them. Between the turns of an agent they keep their KV."""
    rollout = job.recipe.rollout
    share = rollout.begun_share if rollout.partial != "off" else 1
    samples = math.ceil(share * job.recipe.prompts.batch_prompts) * rollout.samples_per_prompt
    return samples if job.recipe.agent.path else min(samples, rollout.max_running)


def _with_larger_kv(found: Fit[RunMemory], whole: int, find_room: Callable[[], Room]) -> Fit[RunMemory]:
    """Raise the KV cache of each engine to `whole` MB, or to as much as fits while all engines work and during an update.

    It grows by GROWN_KV_SHARE of the memory at most, because other runs on the machine may grow theirs. What a larger cache brings was
    not measured.
    """
    job, sequences = found.job, _sequences_at_once(found.job)

    def needs_with(mb: int, room: Room) -> list[Need]:
        return job.with_settings({"rollout.kv_cache_mb": mb, "rollout.min_actors": job.engines_at_once(room)}).peaks(room)

    def lacks_room(mb: int) -> bool:
        return room.first_without_room(needs_with(mb, room), used_memory_share(job, room)) is not None

    room, chosen, share = job.rooms[0], job.recipe.rollout.engine_kv_mb, job.recipe.cluster.memory_share_note
    why = f"more does not fit beside the rest{share}"
    if is_small(needs_with(whole, room)):
        chosen = whole
    elif not (room := find_room()).on_gpu and room.bytes is not None:
        budget = used_memory_share(job, room) * room.bytes  # of the largest node: it may have all engines
        grown_mb = int(GROWN_KV_SHARE * budget / job.engines_at_once(room)) >> 20
        most = min(whole, max(chosen, DEFAULT_KV_MB) + grown_mb)
        chosen += bisect.bisect_left(range(chosen + 1, most + 1), True, key=lacks_room)
        if chosen == most:
            why = f"beyond {DEFAULT_KV_MB} MB each, engines take at most {gb(GROWN_KV_SHARE * budget)} of {gb(room.bytes)}{share}"
    changed = _with_kv(job, chosen)
    found = replace(found, job=changed, needs=changed.peaks(room))
    if room.resource == GPU or not job.kv_mb(1):
        return found
    held = bisect.bisect_right(range(1, sequences + 1), chosen, key=job.kv_mb)
    tokens = f"sequences of {job.longest_tokens} tokens"
    if held == sequences:
        return replace(found, kv=f"rollout.kv_cache_mb={chosen} (auto: all {sequences} {tokens} at once)")
    why = "the memory is not known here" if room.bytes is None else why
    few = ", which is almost no KV cache" if held < FEW_SEQUENCES else ""
    limited = f"rollout.kv_cache_mb={chosen} (auto: {held} of {sequences} {tokens} at once{few}, because {why})"
    return replace(found, reason="; ".join(filter(None, [found.reason, limited])))
