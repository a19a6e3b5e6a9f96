"""Run one rollout in virtual time: a policy decides from live progress who decodes where, and time and cost are counted.

All policies run on the same engine and are charged alike: every second of a lease, `start_s` at its beginning, and
`migrate_s` without decoding for each sequence that moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.simulate.rollout.decoding import ActorLease, VirtualEngines
from placement.simulate.rollout.view import RolloutJob, RolloutPolicy, View

MAX_DECISIONS = 100_000  # limit for a policy that lets nothing decode


@dataclass(frozen=True)
class PolicyStep:
    """One decision that changed something: when, why, and the numbers of moves, opened and closed leases."""

    at_s: float
    reason: str
    moved: int
    opened: int
    closed: int


@dataclass(frozen=True)
class Result:
    """Outcome of a rollout. cost: Σ seconds of `leases`. finish_s (n,): end of each sequence. moves: sequences moved."""

    time_s: float
    cost: float
    leases: tuple[ActorLease, ...]
    finish_s: np.ndarray
    moves: int
    decisions: tuple[PolicyStep, ...]


def run(lengths: np.ndarray, job: RolloutJob, policy: RolloutPolicy) -> Result:
    """Run a policy on sequences of true lengths (n,)."""
    engine = VirtualEngines(lengths, job.prompts, job.speed, job.start_s, job.migrate_s, job.capacity)
    steps = []
    for _ in range(MAX_DECISIONS):
        at = engine.time_s
        action = policy.decide(make_view(engine, job))
        if action is not None:
            _check_action(action.actor, action.hold, engine.finished, job.max_actors)
            moved, opened, closed = engine.place(action.actor, action.hold)
            if moved or opened or closed:
                steps.append(PolicyStep(at, action.reason, moved, opened, closed))
        engine.advance(at + job.interval_s)
        if engine.finished.all():
            return result_of(engine, steps)
    raise undecoded(engine)


def result_of(engine: VirtualEngines, steps: Sequence[PolicyStep] = ()) -> Result:
    """End the leases and return the outcome."""
    engine.finish()
    leases = tuple(sorted(engine.leases, key=lambda lease: (lease.from_s, lease.actor)))
    cost = float(sum(lease.to_s - lease.from_s for lease in leases))
    return Result(engine.time_s, cost, leases, engine.finish_s, engine.moves, tuple(steps))


def undecoded(engine: VirtualEngines) -> RuntimeError:
    """Return the error of a policy that lets nothing decode."""
    return RuntimeError(f"the policy left {int((~engine.finished).sum())} sequences undecoded after {MAX_DECISIONS} decisions")


def make_view(engine: VirtualEngines, job: RolloutJob) -> View:
    """Return what a policy may know now: copies, without any length that has not been generated.

    Tokens are rounded to a millionth: the last bits of a sum depend on its order, and the order on the true lengths.
    """
    return View(
        job=job,
        time_s=engine.time_s,
        generated=engine.generated.round(6),
        finished=engine.finished.copy(),
        actor=engine.actor.copy(),
        ready_s=dict(engine.ready),
    )


def _check_action(actor: np.ndarray, hold: frozenset[int], finished: np.ndarray, max_actors: int) -> None:
    is_valid = actor.shape == finished.shape and all(-1 <= a < max_actors for a in {*actor[~finished].tolist(), *hold})
    if not is_valid:
        raise ValueError(f"a policy must place (n,) sequences on actors 0 … {max_actors - 1}, or -1 for none")
