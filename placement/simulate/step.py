"""One training step under one policy, in virtual time: who holds which devices from when to when, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from placement.rollout_engine import Lease
from placement.rollout_policies.fixed import random_split
from placement.rollout_policies.view import Job
from placement.rollout_run import Result, run
from placement.simulate.narrow import Narrowed, Narrowing
from placement.simulate.tail import Costs, Done, Gang, Work, serve
from placement.simulate.terms import Terms

# Rollout policies are asked again after this share of the longest possible rollout; four times as seldom when plans are tried.
ASKED = 0.02


@dataclass(frozen=True)
class StepInput:
    """n responses. lengths (n,) are hidden from every policy but the oracle; prompts (n,) prompt tokens; group (n,) index of
    the prompt; scenarios (n, S) forecast from earlier steps. view: whether this is a scenario that a plan is tried on."""

    lengths: np.ndarray
    prompts: np.ndarray
    group: np.ndarray
    scenarios: np.ndarray
    seed: int = 0
    view: bool = False
    memo: dict[tuple, Rollout] = field(default_factory=dict, compare=False, repr=False)  # rollouts made already, by arguments

    @property
    def tokens(self) -> np.ndarray:
        """(n,) tokens of prompt and response together: what is learned from."""
        return self.lengths + self.prompts


@dataclass(frozen=True)
class Hold:
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
    """One step. full: device-seconds held. busy: device-seconds of work (decoding until an engine's own last response,
    forward passes, learning), start-up and idling excluded. reason: the plan in words."""

    policy: str
    time_s: float
    full: float
    busy: float
    rollout_s: float
    moves: int
    holds: tuple[Hold, ...]
    reason: str = ""
    planned: tuple[float, float] | None = None  # time and cost that the plan expected

    @property
    def most_devices(self) -> int:
        """Most devices held at once."""
        edges = sorted([(round(h.from_s, 9), h.devices) for h in self.holds] + [(round(h.to_s, 9), -h.devices) for h in self.holds])
        return int(max(np.cumsum([d for _, d in edges]), default=0))


@dataclass(frozen=True)
class Knobs:
    """What a step plan chooses: engines at most, the rollout's prefer, the learner's devices during the rollout (0: none)
    and after it, and the share of responses that must have ended before the early learner is leased.

    narrow: whether engines are given up for the early learner at that share; otherwise it waits until they are released
    anyway. linear: whether whitened advantages are learned from early, by linearity (`work_of`). awake: whether the learner
    is sharded so that engines on its devices need not sleep. hosted: whether the optimizer's state waits in the host's memory for
    the update (`Trainer`). held: devices that the job holds throughout and plans on (0: every
    lease is given back when its phase ends).
    """

    engines: int
    prefer: float
    early: int
    late: int
    share: float = 0.0
    narrow: bool = False
    linear: bool = False
    awake: bool = False
    hosted: bool = False
    held: int = 0

    @property
    def reason(self) -> str:
        before = "nothing learns meanwhile, "
        if self.early:
            how = " (linear)" * self.linear + " (hosted)" * self.hosted
            before = f"{self.early} devices learn{how} {'from' if self.narrow else 'once'} {self.share:.0%} ended, "
        held = f"{self.held} devices held throughout, " * bool(self.held)
        return f"{held}at most {self.engines} engines, prefer {self.prefer:g}; {before}{self.late} afterwards"


@dataclass(frozen=True)
class Rollout:
    """A rollout on this cluster's clock: prefill first, then what `simulate_rollout` did, shifted by it."""

    result: Result
    prefill_s: float
    start_s: float
    leases: tuple[Lease, ...] = field(default=())

    @property
    def end_s(self) -> float:
        return self.prefill_s + self.result.time_s

    @property
    def finish_s(self) -> np.ndarray:
        return self.prefill_s + self.result.finish_s

    def holds(self, width: int) -> list[Hold]:
        return [Hold("rollout", width, lease.from_s, lease.to_s) for lease in self.leases]

    def busy(self, width: int) -> float:
        """Device-seconds after each lease's start-up (its prefill is work)."""
        return width * sum(max(0.0, lease.to_s - lease.from_s - self.start_s) for lease in self.leases)

    def free_from(self, engines: int) -> float:
        """When at most `engines` engines are held, for good."""
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
    terms: Terms,
    given: StepInput,
    policy: str,
    *,
    engines: int,
    prefer: float,
    capacity: int | None = None,
    transfer_s: float | None = None,
    wake_s: float | None = None,
    narrowings: tuple[Narrowing, ...] = (),
) -> Rollout:
    """Generate. Every newly opened engine wakes and receives the weights (start-up, billed); the prompts are prefilled by
    the engines that the rollout begins with, each prompt once, or once per sample where deduplication is off. narrowings:
    when engines are given up."""
    start = (terms.wake_s if wake_s is None else wake_s) + (terms.reshard_s if transfer_s is None else transfer_s)
    key = (policy, engines, prefer, capacity, start, narrowings)
    if key in given.memo:
        return given.memo[key]
    job = Job(
        given.lengths[:, None] if policy == "oracle" else given.scenarios,
        terms.speed,
        max(1, min(engines, len(given.lengths))),
        prefer,
        terms.migrate_s,
        start,
        given.prompts,
        capacity or terms.capacity,
        ASKED * (4 if given.view else 1) * terms.setting.response_limit * terms.speed.base_s,
        given.seed,
        given.group,
    )
    result = run(given.lengths, job, Narrowed(policy, job, narrowings))
    given.memo[key] = on_clock(terms, given, result, start)
    return given.memo[key]


def on_clock(terms: Terms, given: StepInput, result: Result, start_s: float) -> Rollout:
    """A rollout behind its prefill; start_s: what every lease began with."""
    first = [lease for lease in result.leases if lease.from_s == 0]
    if terms.setting.dedup_prefill:
        _, one = np.unique(given.group, return_index=True)
        tokens = float(given.prompts[one].sum())
    else:
        tokens = float(given.prompts.sum())
    shift = terms.prefill_s(tokens, len(first))
    leases = tuple(Lease(lease.actor, lease.from_s + (shift if lease.from_s else 0.0), lease.to_s + shift) for lease in result.leases)
    return Rollout(result, shift, start_s, leases)


def work_of(terms: Terms, given: StepInput, finish_s: np.ndarray, *, gradients: bool, linear: bool = False) -> Work:
    """What may run before the last response. Forward passes always; gradients only with one optimizer update per rollout
    (they add up exactly): GRPO's once a prompt's responses are complete, PPO's critic's at once, PPO's policy's at once where
    advantages are not whitened over the batch.

    linear: where they are, too. Moments (m, s) of the batch are known only at its end, but with one update the ratio of
    probabilities is 1, so the policy's gradient Σ ((A - m) / s) ∇log π equals (Σ A ∇log π - m Σ ∇log π) / s: two sums, each of which
    adds up. They take one forward and two backward passes, 5/3 of a training pass, and a second set of gradients.
    """
    nobody = np.full(len(finish_s), -1)
    if not gradients or terms.setting.updates > 1:
        return Work(finish_s, given.tokens, nobody, 0.0)
    if not terms.ppo:
        return Work(finish_s, given.tokens, given.group, 1.0)
    if not terms.setting.whiten:
        return Work(finish_s, given.tokens, nobody, 2.0)
    return Work(finish_s, given.tokens, nobody, 1.0 + 5 / 3, 2.0) if linear else Work(finish_s, given.tokens, nobody, 1.0)


def costs_of(terms: Terms, work: Work) -> Costs:
    def finish_s(tokens: float, m: int) -> float:
        if not work.gradients:
            return terms.learn_s(tokens, m)
        waiting = max(0.0, terms.models - work.gradients)
        last = tokens if waiting else m * terms.trainer.least_batch_tokens
        return terms.gradients_s(tokens, m, waiting) + terms.update_s(m, last)

    def early_tokens(m: int) -> int:
        # Batches too small to hide their transfers waste devices that would wait otherwise: a quarter of the step at most.
        quarter = float(work.tokens.sum()) / (4 * m)
        return int(min(terms.trainer.even_tokens(m), max(quarter, terms.trainer.least_batch_tokens)))

    return Costs(
        terms.prepare_s,
        lambda tokens, m: terms.gradients_s(tokens, m, 1.0),
        terms.regang_s,
        finish_s,
        int(terms.setting.phases["micro_batch_tokens"]),
        early_tokens,
    )


def learn_beside(
    terms: Terms,
    given: StepInput,
    rollout: Rollout,
    early: int,
    late: int,
    from_s: float,
    *,
    gradients: bool = True,
    linear: bool = False,
) -> Done:
    """The learner's part of a step: `early` devices from `from_s` on, `late` ones when the rollout is over."""
    work = work_of(terms, given, rollout.finish_s, gradients=gradients, linear=linear)
    return serve(work, Gang(early, late, from_s, rollout.end_s), costs_of(terms, work))


def decode_busy(terms: Terms, given: StepInput, engines: int) -> float:
    """Device-seconds that a blind equal split decodes, each engine until its own last response."""
    split = random_split(len(given.lengths), engines, given.seed)
    return terms.width * sum(
        terms.speed.rollout_s(given.lengths[split == a], given.prompts[split == a]) for a in range(engines) if (split == a).any()
    )
