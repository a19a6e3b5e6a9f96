"""One rollout in virtual time under a policy that is named; `rollout_run.py` says how all are charged."""

from __future__ import annotations

import numpy as np

from placement.rollout_policies import NAMES, make_policy
from placement.rollout_policies.view import Job
from placement.rollout_run import Result, run
from placement.speed import Speed


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
