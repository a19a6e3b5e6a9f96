"""Choose the settings that are `auto` so that the predicted peaks fit the memory: of updates, and the size of engines' KV caches on CPU.

Predictions are estimates (`placement.peak_memory`). They determine `auto` settings, and refuse a run only if no choice of these fits.
A job without `auto` settings is refused only by lower bounds (`preflight.memory_check`).
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from placement import peak_memory
from placement.peak_memory import UpdateSettings
from placement.speed.roofline import FEW_SEQUENCES
from rlhfless_ray.preflight.divisions import divisions, on_more_ranks, why_undivided
from rlhfless_ray.preflight.memory_check import SMALL_BYTES, DoesNotFit, advise
from rlhfless_ray.preflight.memory_needs import CPU, JobMemory, Need, Room, Settings, gb, megabytes, statement
from rlhfless_ray.preflight.run_memory import SURE_SEQUENCES, RunMemory
from rlhfless_ray.recipe.rollout_sections import DEFAULT_KV_MB

GROWN_KV_SHARE = 0.1  # largest share of the memory that settings may take for all KV caches beyond 256 MB each
J = TypeVar("J", bound=JobMemory)


@dataclass(frozen=True)
class Fit(Generic[J]):
    """A job whose `auto` settings are decided.

    `needs`: predicted peaks. `reason`: why a setting that was `auto` is not its default; empty if all are. `note`: message for the user.
    `kv`: what the KV cache of an engine on CPU holds; empty unless its size was `auto` and is known.
    `give_back_at_once`: whether parked engines must release weights and KV cache at once, because an update does not fit beside them.
    Otherwise they keep both until gaps are known to be long.
    `updates_obstacle`: why policy and critic cannot learn at the same time. Empty if both fit.
    """

    job: J
    needs: list[Need]
    reason: str = ""
    note: str = ""
    kv: str = ""
    give_back_at_once: bool = False
    updates_obstacle: str = ""

    def step_mb(self, engines: int = 0) -> dict[str, float]:
        """Return predicted peaks in MB to compare with a step's measured ones. Empty on GPUs, whose memory is not measured.

        `engines`: number of engines that worked.
        """
        together = [need.bytes / 1e6 for need in self.needs if not need.alone]
        if not together:
            return {}
        found = megabytes(self.needs)
        return {name: mb * (engines if name == "engines" else 1) for name, mb in found.items()} | {"total": max(together)}

    def kv_on(self, resource: str) -> str:
        """Return `kv` if slots are of this resource. Everything small is fitted before it is known, and on GPUs the size has no effect."""
        return self.kv if resource == CPU else ""

    def statement(self, least_mb: Mapping[str, float], resource: str) -> str:
        """Describe the predicted memory of the working functions, and the settings chosen for it, in one line."""
        return "; ".join(filter(None, [statement(megabytes(self.needs), least_mb), self.kv_on(resource), self.reason]))


def fit(job: J, find_room: Callable[[], Room]) -> Fit[J]:
    """Choose the settings that are `auto`, see `fit_update`.

    Of tensor parallelism and ZeRO stage, the first division is taken with which the other settings keep their defaults. If none does, it
    is the one with the fastest settings. A number of ranks that is `auto` begins with the fewest that fit.
    """
    find_room = functools.cache(find_room)
    found: list[tuple[Fit[J], Settings]] = []
    problem: DoesNotFit | None = None
    first, *others = divisions(job)
    for division in (first, *others):
        try:
            found.append((_fit_division(job.with_settings(division), find_room), division))
        except DoesNotFit as error:
            problem = problem or error
        else:
            if not found[-1][0].reason and not found[-1][0].note:
                break
    if not found:
        assert problem is not None
        if (more := on_more_ranks(job, find_room().slots)) is None:
            raise problem
        return fit(more, find_room)
    best, division = min(found, key=lambda one: _slowness(one[0]))
    whys = [why_undivided(job), best.reason]
    if changed := [key for key in division if division[key] != first[key]]:
        values, before = " and ".join(f"{key}={division[key]}" for key in changed), " and ".join(str(first[key]) for key in changed)
        whys.insert(1, f"{values} (auto: with {before} an update needs more memory, or slower settings)")
    return replace(best, reason="; ".join(filter(None, whys)))


def _slowness(found: Fit[J]) -> tuple[float, ...]:
    """Return what orders fits by the time that their settings cost, as `peak_memory.choices` does."""
    learner = found.job.recipe.learner
    slower = bool(found.note), learner.offloads_optimizer, learner.overlap == "off", learner.recomputes_activations
    return *map(float, slower), -learner.max_micro_batch_tokens, learner.tensor_parallel, learner.zero_stage


def _fit_division(job: J, find_room: Callable[[], Room]) -> Fit[J]:
    if not isinstance(job, RunMemory):
        return fit_update(job, find_room)
    found = (_fit_with_kv if job.recipe.rollout.kv_cache_mb == "auto" else fit_update)(job, find_room)
    if not is_small(found.job.peaks_with(job.rooms[0], engines_keep=True)):
        room = find_room()
        kept = [need for need in found.job.peaks_with(room, engines_keep=True) if need.of_update]
        too_much = room.first_without_room(kept, used_memory_share(job, room)) is not None
        found = replace(found, give_back_at_once=too_much and not room.on_gpu, updates_obstacle=_updates_obstacle(found, room))
    return cast(Fit[J], found)


def _updates_obstacle(found: Fit[RunMemory], room: Room) -> str:
    both = found.job.updates_at_once(found.needs)
    short = None if both is None or room.on_gpu else room.first_without_room([both], used_memory_share(found.job, room))
    return "" if short is None else f"{short.who} would take about {gb(short.bytes)}, too much for this memory"


# ---- updates ----------------------------------------------------------------------------------------------------


def fit_update(job: J, find_room: Callable[[], Room]) -> Fit[J]:
    """Choose the settings of section `learner` that are `auto`: of all values that fit, those that cost the least time.

    `find_room` is called unless everything is small. Raises DoesNotFit if a setting of a run is `auto` and no value of it fits. A stage
    then gets the values that need least, and a note.
    """
    auto = job.auto
    whole = job.with_update(auto, UpdateSettings())
    if is_small(need for room in job.rooms for need in whole.peaks(room)):
        return Fit(whole, whole.peaks(job.rooms[0]))
    room = find_room()
    needs, used_share = whole.peaks(room), used_memory_share(job, room)
    too_large = room.first_without_room(_of_updates(needs), used_share)
    if too_large is None:
        return Fit(whole, needs, note=_host_note(needs, room))
    assert room.bytes is not None
    there = room.bytes if too_large.alone else room.total_bytes or room.bytes
    budget = f"{used_share:.0%} of {gb(there)}{job.recipe.cluster.memory_share_note}"
    reason = f"auto: with the defaults {too_large.who} would take about {gb(too_large.bytes)}, more than {budget}"

    def chosen(changed: J) -> str:
        learner, default = changed.recipe.learner, whole.recipe.learner
        values = {key: getattr(learner, key) for key in auto if getattr(learner, key) != getattr(default, key)}
        return " and ".join(f"learner.{key}={json.dumps(value).strip(chr(34))}" for key, value in values.items())

    def fitted(changed: J, needs: list[Need]) -> Fit[J]:
        return Fit(changed, needs, f"{chosen(changed)} ({reason})" if chosen(changed) else "", _host_note(needs, room))

    tried = [(changed, changed.peaks(room)) for changed in _choices(job, room)]
    for changed, needs in tried:
        if room.first_without_room(_of_updates(needs), used_share) is None:
            return fitted(changed, needs)
    changed, needs = min(tried, key=lambda one: max(need.bytes for need in _of_updates(one[1])))
    short = room.first_without_room(_of_updates(needs))
    if short is None:
        return fitted(changed, needs)
    tried_too = f", also with {chosen(changed)}" if chosen(changed) else ""
    advice = advise(job, room, lambda changed: _may_fit(changed, room), _smaller(job))
    problem = f"{short.key}: {room.shortage(short)}{tried_too}; {advice}"
    if isinstance(job, RunMemory) and auto:
        raise DoesNotFit(problem)
    return replace(fitted(changed, needs), note=f"the memory may not be enough: {problem}")


def is_small(needs: Iterable[Need]) -> bool:
    return all(need.bytes <= SMALL_BYTES for need in needs)


def used_memory_share(job: JobMemory, room: Room) -> float:
    """Return the share of the memory that a run's settings may take. Functions take turns on a GPU, also those of several runs."""
    return peak_memory.USED_SHARE * (1.0 if room.on_gpu else job.recipe.cluster.memory_share)


def _host_note(needs: list[Need], room: Room) -> str:
    """Return a message if the state of parked ranks is larger than the host memory beside their GPUs."""
    short = room.first_without_room(need for need in needs if need.on_host)
    return f"the memory may not be enough: {short.key}: {room.shortage(short)}" if short else ""


def _may_fit(job: JobMemory, room: Room) -> bool:
    return any(room.first_without_room(_of_updates(changed.peaks(room))) is None for changed in _choices(job, room))


def _choices(job: J, room: Room) -> Iterator[J]:
    """Yield the job with each choice of the settings that are `auto`, in order of the time they cost."""
    auto = job.auto
    for choice in peak_memory.choices(may_offload=room.on_gpu and job.recipe.learner.zero_stage > 0):
        yield job.with_update(auto, choice)


def _of_updates(needs: list[Need]) -> list[Need]:
    """Return the needs that the settings of an update change."""
    return [need for need in needs if need.of_update]


def _smaller(job: JobMemory) -> Iterator[Settings]:
    """Yield settings of an update that save memory and differ from the recipe's."""
    learner = job.recipe.learner
    tokens = learner.max_micro_batch_tokens // 2
    while learner.micro_batch_tokens != "auto" and tokens >= peak_memory.LEAST_WHOLE_TOKENS:
        yield {"learner.micro_batch_tokens": tokens}
        tokens //= 2
    if learner.gradient_checkpointing is False:
        yield {"learner.gradient_checkpointing": True}


# ---- KV caches --------------------------------------------------------------------------------------------------


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
    return samples if job.recipe.agent.is_used else min(samples, rollout.max_running)


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
    if room.on_gpu or not job.kv_mb(1):
        return found
    held = bisect.bisect_right(range(1, sequences + 1), chosen, key=job.kv_mb)
    tokens = f"sequences of {job.longest_tokens} tokens"
    if held == sequences:
        return replace(found, kv=f"rollout.kv_cache_mb={chosen} (auto: all {sequences} {tokens} at once)")
    why = "the memory is not known here" if room.bytes is None else why
    few = ", which is almost no KV cache" if held < FEW_SEQUENCES else ""
    limited = f"rollout.kv_cache_mb={chosen} (auto: {held} of {sequences} {tokens} at once{few}, because {why})"
    return replace(found, reason="; ".join(filter(None, [found.reason, limited])))
