"""The work that runs bring to a shared pool: steps whose stages can use any of several numbers of devices."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from placement.simulate.phase_times import PhaseTimes
from placement.simulate.setting import Setting
from placement.simulate.simulate_run import workload_of

PARTS = (0.5, 0.8, 0.95, 1.0)  # shares of ended responses at which the stages of a rollout end
TAIL = 0.8  # from this share of ended responses on a rollout is in its tail, as in RollMux


@dataclass(frozen=True)
class Stage:
    """A part of a step. It takes `seconds[i]` on `slots[i]` devices, both in ascending order of slots, and needs at least `slots[0]`.

    kind: "rollout", "tail" or "learn". setup_s: seconds until devices that a run takes for this stage can work, for each of `slots`.
    """

    kind: str
    slots: tuple[int, ...]
    seconds: tuple[float, ...]
    setup_s: tuple[float, ...]

    def _at(self, slots: int) -> int:
        """Return the index of the largest number of devices up to `slots` that the stage can use. Raises ValueError if there is none."""
        index = bisect_right(self.slots, slots) - 1
        if index < 0:
            raise ValueError(f"the {self.kind} stage needs at least {self.slots[0]} devices, got {slots}")
        return index

    def seconds_on(self, slots: int) -> float:
        return self.seconds[self._at(slots)]

    def setup_on(self, slots: int) -> float:
        return self.setup_s[self._at(slots)]

    @cached_property
    def least_slot_s(self) -> float:
        """Device-seconds on the cheapest number of devices: the work that there is to do."""
        return min(slots * seconds for slots, seconds in zip(self.slots, self.seconds, strict=True))


Step = tuple[Stage, ...]


@dataclass(frozen=True)
class ArrivingRun:
    """A run that arrives at the pool. forecast: for each step the one before it, which is all that the run knows of the next."""

    name: str
    arrival_s: float
    steps: tuple[Step, ...]
    forecast: tuple[Step, ...]

    @cached_property
    def least_slots(self) -> int:
        """Devices without which no stage of the run can work."""
        return max(stage.slots[0] for step in (*self.steps, *self.forecast) for stage in step)

    @cached_property
    def work(self) -> float:
        """Device-seconds of all stages, each on its cheapest number of devices."""
        return sum(stage.least_slot_s for step in self.steps for stage in step)


def pool_run(name: str, setting: Setting, steps: int, sizes: Sequence[int], arrival_s: float = 0.0, seed: int = 0) -> ArrivingRun:
    """Return a run of a setting with synthetic lengths. sizes: numbers of devices that its stages may work on."""
    workload = workload_of(setting.but(steps_per_epoch=1, epochs=steps + 1), seed)
    times = PhaseTimes.from_setting(setting)
    samples = workload.lengths.shape[2]
    found = [
        step_of(times, workload.lengths[i].ravel(), np.repeat(workload.prompt_tokens[i], samples), sizes)
        for i in range(len(workload.epoch))
    ]
    return ArrivingRun(name, arrival_s, tuple(found[1:]), tuple(found[:-1]))


def step_of(times: PhaseTimes, lengths: np.ndarray, prompts: np.ndarray, sizes: Sequence[int]) -> Step:
    """Return the stages of one step: parts of the rollout, then log-probabilities and learning.

    lengths, prompts (n,): tokens of responses and of their prompts.
    """
    tokens = float(lengths.sum() + prompts.sum())
    return (*rollout_stages(times, lengths, prompts, sizes), _learn_stage(times, tokens, sizes))


def rollout_stages(times: PhaseTimes, lengths: np.ndarray, prompts: np.ndarray, sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages of a rollout whose live responses are always spread evenly over the engines.

    All responses are at the same token. At each the engine with the most of them decides, so one engine takes exactly as long as
    `Speed.rollout_s` says.
    """
    order = np.argsort(lengths, kind="stable")
    ends, tokens = np.maximum(1, lengths[order]).astype(int), prompts[order].astype(float)
    at = np.arange(ends[-1])
    ended = np.searchsorted(ends, at, side="right")  # responses that have ended before each token
    live = len(ends) - ended
    context = np.append(np.cumsum(tokens[::-1])[::-1], 0.0)[ended] / live + at + 0.5  # mean tokens of a live response
    held = max(1, int(np.ceil((live * context).max() / times.capacity)))  # engines whose caches hold all of them
    engines = [size // times.width for size in sizes if size // times.width >= held]
    if not engines:
        raise ValueError(f"{held} engines hold this rollout, more than {max(sizes)} devices have")
    speed, bounds = times.speed, [0, *(int(np.quantile(ends, part, method="higher")) for part in PARTS)]
    each = [speed.base_s + np.ceil(live / n) * (speed.per_seq_s + speed.per_ctx_s * context) for n in engines]
    total = [np.append(0.0, np.cumsum(one)) for one in each]
    stages = []
    for part, (start, end) in zip(PARTS, itertools.pairwise(bounds), strict=True):
        seconds = [one[end] - one[start] for one in total]
        if start == 0:
            seconds = [one + times.prefill_s(float(prompts.sum()), n) for one, n in zip(seconds, engines, strict=True)]
        if end > start:
            wake = times.wake_s + times.broadcast_s
            kind = "tail" if part > TAIL else "rollout"
            stages.append(_stage(kind, [n * times.width for n in engines], seconds, [wake] * len(engines)))
    return tuple(stages)


def _learn_stage(times: PhaseTimes, tokens: float, sizes: Sequence[int]) -> Stage:
    fitting = [size for size in sizes if size >= times.min_learner]
    if not fitting:
        raise ValueError(f"the learner's state needs {times.min_learner} devices, more than {max(sizes)}")
    seconds = [times.prepare_s(tokens, m) + times.learn_s(tokens, m) for m in fitting]
    return _stage("learn", fitting, seconds, [2 * times.state_s(m) for m in fitting])  # its state comes, and goes again


def _stage(kind: str, slots: Sequence[int], seconds: Sequence[float], setup_s: Sequence[float]) -> Stage:
    """Return a stage without numbers of devices that are no faster than fewer."""
    kept, best = [], np.inf
    for i, one in enumerate(seconds):
        if one < best:
            kept.append(i)
            best = one
    return Stage(kind, tuple(slots[i] for i in kept), tuple(float(seconds[i]) for i in kept), tuple(setup_s[i] for i in kept))
