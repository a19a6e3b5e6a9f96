"""One rollout in virtual time under a policy that decides from live progress who decodes where: what it takes and costs.

All policies run on the same engine and are charged alike: every second of a lease, `start_s` at its beginning and `migrate_s`
of silence for each sequence that moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.rollout_engine import Engine, Lease
from placement.rollout_policies import NAMES, make_policy
from placement.rollout_policies.view import Job, View
from placement.speed import Speed

PATIENCE = 100_000  # replans after which a rollout whose policy decodes nothing is given up


@dataclass(frozen=True)
class Step:
    """One decision that changed something: when, why, and what it did."""

    at_s: float
    reason: str
    moved: int
    opened: int
    closed: int


@dataclass(frozen=True)
class Result:
    """What one rollout took. cost: Σ seconds of `leases`; finish_s (n,): when each sequence ended; moves: sequences moved."""

    time_s: float
    cost: float
    leases: tuple[Lease, ...]
    finish_s: np.ndarray
    moves: int
    decisions: tuple[Step, ...]


def simulate_rollout(
    true_lengths: np.ndarray,
    scenarios: np.ndarray,
    speed: Speed,
    *,
    policy: str,
    max_actors: int,
    prefer: float = 0.5,
    migrate_s: float = 0.0,
    start_s: float = 0.0,
    seed: int = 0,
    prompts: np.ndarray | None = None,
    capacity: int | None = None,
    interval_s: float = 0.1,
) -> Result:
    """Run one rollout of n responses on at most `max_actors` actors and return what it took.

    true_lengths (n,) response tokens, hidden from every policy but `oracle`; scenarios (n, S) forecasts, one column a joint
    draw; prompts (n,) prompt tokens (none given: 0). policy is one of `NAMES`; prefer from 0 (cheapest) to 1 (fastest) turns
    the knob that this policy has. migrate_s: seconds for which a moved sequence does not decode; start_s: seconds, billed, from
    the opening of a lease to its first token; capacity: KV tokens an actor holds, sequences beyond it wait. The policy is asked
    every `interval_s`. An actor whose last sequence ends is released at once unless its policy holds it.

    Raises ValueError for an unknown policy, shapes that do not agree, lengths that are empty, not finite or below 1, a
    sequence that fits no actor, or a number out of its range.
    """
    lengths = np.asarray(true_lengths, float)
    forecast = np.asarray(scenarios, float)
    context = np.zeros(len(lengths)) if prompts is None else np.asarray(prompts, float)
    _check(lengths, forecast, context, speed, policy, max_actors, prefer, migrate_s, start_s, capacity, interval_s)
    if policy == "oracle":
        forecast = lengths[:, None]
    job = Job(forecast, speed, max_actors, prefer, migrate_s, start_s, context, capacity, interval_s, seed)
    return run(lengths, job, make_policy(policy, job))


def run(lengths: np.ndarray, job: Job, policy: object) -> Result:
    """Run `policy` (anything with `decide(view) -> Action | None`) on sequences of these true lengths (n,)."""
    engine = Engine(lengths, job.prompts, job.speed, job.start_s, job.migrate_s, job.capacity)
    steps = []
    for _ in range(PATIENCE):
        at = engine.time_s
        action = policy.decide(show(engine, job))  # type: ignore[attr-defined]
        if action is not None:
            _check_action(action.actor, action.hold, engine.finished, job.max_actors)
            moved, opened, closed = engine.place(action.actor, action.hold)
            if moved or opened or closed:
                steps.append(Step(at, action.reason, moved, opened, closed))
        engine.advance(at + job.interval_s)
        if engine.finished.all():
            engine.finish()
            leases = tuple(sorted(engine.leases, key=lambda lease: (lease.from_s, lease.actor)))
            cost = float(sum(lease.to_s - lease.from_s for lease in leases))
            return Result(engine.time_s, cost, leases, engine.finish_s, engine.moves, tuple(steps))
    raise RuntimeError(f"the policy left {int((~engine.finished).sum())} sequences undecoded after {PATIENCE} decisions")


def show(engine: Engine, job: Job) -> View:
    """What a policy may know now: copies, none of which holds a length that has not been generated.

    Tokens are rounded to a millionth: the last bits of a sum depend on its order, and that on the truth.
    """
    return View(
        job=job,
        time_s=engine.time_s,
        generated=engine.generated.round(6),
        finished=engine.finished.copy(),
        actor=engine.actor.copy(),
        paused_until=engine.paused_until.copy(),
        ready_s=dict(engine.ready),
    )


def _check(
    lengths: np.ndarray, scenarios: np.ndarray, prompts: np.ndarray, speed: Speed, policy: str, max_actors: int, prefer: float,
    migrate_s: float, start_s: float, capacity: int | None, interval_s: float,
) -> None:
    if policy not in NAMES:
        raise ValueError(f"unknown policy {policy!r}: use one of {', '.join(NAMES)}")
    if lengths.ndim != 1 or not len(lengths) or not np.isfinite(lengths).all() or lengths.min() < 1:
        raise ValueError("true_lengths must be a non-empty row of finite numbers of at least 1 token")
    if scenarios.ndim != 2 or len(scenarios) != len(lengths) or not scenarios.shape[1] or not np.isfinite(scenarios).all():
        raise ValueError(f"scenarios must be finite, of shape ({len(lengths)}, S) with S ≥ 1, not {scenarios.shape}")
    if prompts.shape != lengths.shape or not np.isfinite(prompts).all() or prompts.min() < 0:
        raise ValueError(f"prompts must be finite, not negative, of shape ({len(lengths)},), not {prompts.shape}")
    if min(speed.base_s, speed.per_seq_s, speed.per_ctx_s) < 0 or speed.step_s(1) <= 0:
        raise ValueError(f"a decode step must take time, not {speed}")
    if max_actors < 1:
        raise ValueError(f"max_actors must be at least 1, not {max_actors}")
    if not 0 <= prefer <= 1:
        raise ValueError(f"prefer must lie in 0 … 1, not {prefer}")
    if min(migrate_s, start_s) < 0 or interval_s <= 0:
        raise ValueError(f"migrate_s and start_s must not be negative and interval_s positive: {migrate_s}, {start_s}, {interval_s}")
    if capacity is not None and (prompts + lengths).max() > capacity:
        raise ValueError(f"a sequence of {(prompts + lengths).max():.0f} tokens does not fit an actor of {capacity} KV tokens")


def _check_action(actor: np.ndarray, hold: frozenset[int], finished: np.ndarray, max_actors: int) -> None:
    used = np.r_[actor[~finished], list(hold)]
    if actor.shape != finished.shape or used.max(initial=-1) >= max_actors or used.min(initial=0) < -1:
        raise ValueError(f"a policy must place (n,) sequences on actors 0 … {max_actors - 1}, or -1 for none")
