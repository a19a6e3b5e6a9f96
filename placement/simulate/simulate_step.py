"""One training step under one policy in virtual time: which devices each phase holds, for how long, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.simulate.learner_queue import LearnerCosts, LearnerDevices, LearnerResult, LearnerWork, run_learner
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.rollout import make_policy
from placement.simulate.rollout.decoding import ActorLease
from placement.simulate.rollout.fixed import random_split
from placement.simulate.rollout.run_policy import Result, run
from placement.simulate.rollout.view import RolloutJob

# Rollout policies decide again after this share of the longest possible rollout, and a quarter as often in plan trials.
DECISION_SHARE = 0.02
MOST_AT_START = 10_000  # decisions before the first token, where a start takes far longer than the rollout of a tiny model


@dataclass(frozen=True)
class StepInput:
    """A step's n responses.

    lengths (n,): hidden from every policy but the oracle. prompts (n,): prompt tokens. group (n,): index of the prompt.
    scenarios (n, S): forecast from earlier steps. is_trial: whether this is a scenario that a plan is tried on. cache:
    rollouts already simulated, by arguments. learned_tokens: of the batch that is learned beside this rollout, one step
    off.
    """

    lengths: np.ndarray
    prompts: np.ndarray
    group: np.ndarray
    scenarios: np.ndarray
    seed: int = 0
    is_trial: bool = False
    cache: dict[tuple[object, ...], SimulatedRollout] = field(default_factory=dict, compare=False, repr=False)
    learned_tokens: float = 0.0

    @property
    def tokens(self) -> np.ndarray:
        """(n,) tokens of prompt and response together: what is learned from."""
        return self.lengths + self.prompts


@dataclass(frozen=True)
class DeviceHold:
    """Devices held from one time to another, billed whether they work or not."""

    what: str
    devices: int
    from_s: float
    to_s: float

    @property
    def cost(self) -> float:
        return self.devices * (self.to_s - self.from_s)


@dataclass(frozen=True)
class StepRun:
    """Outcome of one step.

    busy: device-seconds of work (decoding until an engine's own last response, forward
    passes, learning), without start-up and idling. planned: time and cost that the plan expected. reason: the plan in
    words. lag: share of the trained tokens by lag, from 0 updates on.
    """

    policy: str
    time_s: float
    busy: float
    rollout_s: float
    moves: int
    holds: tuple[DeviceHold, ...]
    reason: str = ""
    planned: tuple[float, float] | None = None
    lag: tuple[float, ...] = (1.0,)

    @property
    def full(self) -> float:
        """Device-seconds held."""
        return sum(hold.cost for hold in self.holds)


@dataclass(frozen=True)
class StepPlanSettings:
    """The settings of a step plan.

    engines: limit on engines. prefer: the rollout's trade-off. early, late: the learner's devices during the rollout
    (0: none) and after it. share: share of responses that must have ended before the early learner is leased. awake:
    the learner is sharded so that engines on its devices need not sleep. hosted: the optimizer's state stays in host
    memory until the update (`TrainerModel`). held: devices that the job holds throughout and plans on (0: every lease is
    given back when its phase ends). width: devices of one engine (0: the width of the setting).
    """

    engines: int
    prefer: float
    early: int
    late: int
    share: float = 0.0
    awake: bool = False
    hosted: bool = False
    held: int = 0
    width: int = 0

    @property
    def reason(self) -> str:
        before = "nothing learns meanwhile, "
        if self.early:
            how = " (hosted)" * self.hosted
            before = f"{self.early} devices learn{how} once {self.share:.0%} ended, "
        held = f"{self.held} devices held throughout, " * bool(self.held)
        wide = f" of {self.width} devices" * bool(self.width)
        return f"{held}at most {self.engines} engines{wide}, prefer {self.prefer:g}; {before}{self.late} afterwards"


@dataclass(frozen=True)
class SimulatedRollout:
    """A rollout on this cluster's clock: prefill first, then the outcome of `run_policy.run`, shifted by it.

    trained: the batch that it completes, if it ended early (None: all of the step).
    """

    result: Result
    prefill_s: float
    start_s: float
    leases: tuple[ActorLease, ...] = field(default=())
    trained: StepInput | None = None

    @property
    def end_s(self) -> float:
        return self.prefill_s + self.result.time_s

    @property
    def finish_s(self) -> np.ndarray:
        return self.prefill_s + self.result.finish_s

    def holds(self, width: int) -> list[DeviceHold]:
        return [DeviceHold("rollout", width, lease.from_s, lease.to_s) for lease in self.leases]

    def busy(self, width: int) -> float:
        """Return device-seconds after each lease's start-up (its prefill is work)."""
        return width * sum(max(0.0, lease.to_s - lease.from_s - self.start_s) for lease in self.leases)

    def free_from(self, engines: int) -> float:
        """Return when at most `engines` engines are held, for good."""
        edges = sorted([(lease.from_s, 1) for lease in self.leases] + [(lease.to_s, -1) for lease in self.leases])
        held, last = 0, 0.0
        for at, change in edges:
            held += change
            if held > engines:
                last = np.inf
            elif last == np.inf:
                last = at
        return float(last)


def roll_out(
    times: PhaseTimes,
    given: StepInput,
    policy: str,
    *,
    engines: int,
    prefer: float,
    capacity: int | None = None,
    transfer_s: float | None = None,
    wake_s: float | None = None,
) -> SimulatedRollout:
    """Simulate the rollout of a step.

    Every newly opened engine wakes and receives the weights (start-up, billed). The engines that the rollout begins
    with prefill the prompts, each prompt once, or once per sample if deduplication is off.
    """
    start = start_up_s(times, transfer_s, wake_s)
    key = (policy, times.width, engines, prefer, capacity, start)
    if key in given.cache:
        return given.cache[key]
    scenarios = given.lengths[:, None] if policy == "oracle" else given.scenarios
    job = rollout_job(times, given, scenarios, engines, prefer, start, capacity)
    result = run(given.lengths, job, make_policy(policy, job))
    given.cache[key] = on_clock(times, given, result, start)
    return given.cache[key]


def start_up_s(times: PhaseTimes, transfer_s: float | None, wake_s: float | None) -> float:
    """Return the seconds in which an engine wakes and receives the weights. None: as in the setting."""
    return (times.wake_s if wake_s is None else wake_s) + (times.reshard_s if transfer_s is None else transfer_s)


def rollout_job(
    times: PhaseTimes, given: StepInput, scenarios: np.ndarray, engines: int, prefer: float, start_s: float, capacity: int | None
) -> RolloutJob:
    """Return the job of a rollout on at most this many engines. capacity: KV tokens of one, None for the setting's."""
    return RolloutJob(
        scenarios,
        times.speed,
        max(1, min(engines, len(given.lengths))),
        prefer,
        times.migrate_s,
        start_s,
        given.prompts,
        capacity or times.capacity,
        max(DECISION_SHARE * (4 if given.is_trial else 1) * times.setting.response_limit * times.speed.base_s, start_s / MOST_AT_START),
        given.seed,
        given.group,
    )


def on_clock(times: PhaseTimes, given: StepInput, result: Result, start_s: float) -> SimulatedRollout:
    """Put a rollout behind its prefill. start_s: what every lease began with."""
    first = [lease for lease in result.leases if lease.from_s == 0]
    if times.setting.dedup_prefill:
        _, one = np.unique(given.group, return_index=True)
        tokens = float(given.prompts[one].sum())
    else:
        tokens = float(given.prompts.sum())
    shift = times.prefill_s(tokens, len(first))
    return SimulatedRollout(result, shift, start_s, after_prefill(result.leases, shift))


def after_prefill(leases: Sequence[ActorLease], prefill_s: float) -> tuple[ActorLease, ...]:
    """Return the leases of a rollout on a clock that begins before its prefill."""
    return tuple(ActorLease(k.actor, k.from_s + (prefill_s if k.from_s else 0.0), k.to_s + prefill_s) for k in leases)


def work_of(times: PhaseTimes, given: StepInput, finish_s: np.ndarray, *, gradients: bool) -> LearnerWork:
    """Return what the learner may process before the last response.

    Forward passes always. Gradients only with one optimizer update per rollout, where they add up exactly: GRPO's once
    a prompt's responses are complete, PPO's critic's at once, PPO's policy's at once if advantages are not whitened
    over the batch.
    """
    nobody = np.full(len(finish_s), -1)
    if not gradients or times.setting.updates > 1:
        return LearnerWork(finish_s, given.tokens, nobody, 0.0)
    if not times.ppo:
        return LearnerWork(finish_s, given.tokens, given.group, 1.0)
    return LearnerWork(finish_s, given.tokens, nobody, 1.0 if times.setting.whiten else 2.0)


def costs_of(times: PhaseTimes, work: LearnerWork) -> LearnerCosts:
    """Return the learner's costs for this work."""

    def finish_s(tokens: float, m: int) -> float:
        if not work.gradients:
            return times.learn_s(tokens, m)
        waiting = max(0.0, times.models - work.gradients)
        last = tokens if waiting else m * times.trainer.least_batch_tokens
        return times.gradients_s(tokens, m, waiting) + times.update_s(m, last)

    def early_tokens(m: int) -> int:
        # Batches too small to hide their transfers waste devices. But a batch is a quarter of the step at most.
        quarter = float(work.tokens.sum()) / (4 * m)
        return int(min(times.trainer.balanced_tokens(m), max(quarter, times.trainer.least_batch_tokens)))

    return LearnerCosts(
        times.prepare_s,
        lambda tokens, m: times.gradients_s(tokens, m, 1.0),
        times.resize_s,
        finish_s,
        int(times.setting.phases["micro_batch_tokens"]),
        early_tokens,
    )


def learn_beside(
    times: PhaseTimes, given: StepInput, rollout: SimulatedRollout, early: int, late: int, from_s: float, *, gradients: bool = True
) -> LearnerResult:
    """Run the learner's part of a step: `early` devices from `from_s` on, `late` ones when the rollout is over."""
    work = work_of(times, given, rollout.finish_s, gradients=gradients)
    return run_learner(work, LearnerDevices(early, late, from_s, rollout.end_s), costs_of(times, work))


def all_phases(devices: int, end_s: float) -> tuple[DeviceHold, ...]:
    """Return the hold of devices that do everything."""
    return (DeviceHold("all phases", devices, 0.0, end_s),)


def separate_holds(engines: int, trainers: int, end_s: float) -> tuple[DeviceHold, ...]:
    """Return the holds of engines and trainers that keep devices of their own throughout."""
    return DeviceHold("engines", engines, 0.0, end_s), DeviceHold("trainers", trainers, 0.0, end_s)


def describe_split(plan: StepPlanSettings) -> str:
    """Describe a plan with separate devices for engines and trainers."""
    return f"{plan.engines} engines{f' of {plan.width} devices' * bool(plan.width)}, {plan.late} trainers"


def decode_busy(times: PhaseTimes, given: StepInput, engines: int) -> float:
    """Return the device-seconds that an equal split at random decodes, each engine until its own last response."""
    split = random_split(len(given.lengths), engines, given.seed)
    return times.width * sum(
        times.speed.rollout_s(given.lengths[split == a], given.prompts[split == a]) for a in range(engines) if (split == a).any()
    )
