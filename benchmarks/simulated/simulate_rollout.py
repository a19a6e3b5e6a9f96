"""Simulate one rollout in virtual time under a named policy. `placement.simulate.rollout.run_policy` says what policies are charged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.simulate.rollout import NAMES, make_policy
from placement.simulate.rollout.run_policy import Result, run
from placement.simulate.rollout.view import RolloutJob
from placement.speed.decode_speed import Speed


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
    """Simulate one rollout of n responses on at most `max_actors` actors.

    Parameters
    ----------
    true_lengths : array of shape (n,)
        Response tokens, hidden from every policy but `oracle`.
    scenarios : array of shape (n, S)
        Forecasts in tokens, one column per joint draw.
    speed : Speed
        Decode speed of an actor.
    policy : str
        One of "fixed", "random", "global-cut", "rlhfless-paper", "consolidate", "crude-mix", "ours", "oracle".
    max_actors : int
        Actors that may be leased at once.
    prefer : float
        Trade-off from 0 (cheapest) to 1 (fastest), which sets the policy's own parameter.
    migrate_s : float
        Seconds for which a moved sequence does not decode.
    start_s : float
        Billed seconds from the opening of a lease to its first token.
    seed : int
        Seed of policies that split at random.
    prompts : array of shape (n,), optional
        Prompt tokens. Default 0.
    capacity : int, optional
        KV tokens that an actor holds. Sequences beyond it wait.
    interval_s : float
        Seconds between two decisions of the policy.

    Returns
    -------
    Result
        With `time_s`, `cost` and `leases` (each with `actor`, `from_s`, `to_s`). An actor whose last sequence ends is
        released at once, unless its policy holds it.

    Raises
    ------
    ValueError
        For an unknown policy, shapes that disagree, lengths that are empty, not finite or below 1, a sequence that fits
        no actor, or a number out of range.

    Examples
    --------
    >>> lengths = np.array([120.0, 80.0, 75.0, 900.0])
    >>> result = simulate_rollout(lengths, lengths[:, None], Speed(0.01, 1e-4), policy="oracle", max_actors=4)
    >>> round(result.time_s, 2), len(result.leases)
    (9.09, 2)
    """
    lengths = np.asarray(true_lengths, float)
    context = np.zeros(len(lengths)) if prompts is None else np.asarray(prompts, float)
    forecast = np.asarray(scenarios, float)
    job = RolloutJob(forecast, speed, max_actors, prefer, migrate_s, start_s, context, capacity, interval_s, seed)
    _check(lengths, job, policy)
    if policy == "oracle":
        job = replace(job, scenarios=lengths[:, None])
    return run(lengths, job, make_policy(policy, job))


def _check(lengths: np.ndarray, job: RolloutJob, policy: str) -> None:
    """Raise ValueError for arguments that cannot be simulated."""
    if policy not in NAMES:
        raise ValueError(f"unknown policy {policy!r}: use one of {', '.join(NAMES)}")
    if lengths.ndim != 1 or not len(lengths) or not np.isfinite(lengths).all() or lengths.min() < 1:
        raise ValueError("true_lengths must be a non-empty row of finite numbers of at least 1 token")
    scenarios, prompts = job.scenarios, job.prompts
    if scenarios.ndim != 2 or len(scenarios) != len(lengths) or not scenarios.shape[1] or not np.isfinite(scenarios).all():
        raise ValueError(f"scenarios must be finite, of shape ({len(lengths)}, S) with S ≥ 1, not {scenarios.shape}")
    if prompts.shape != lengths.shape or not np.isfinite(prompts).all() or prompts.min() < 0:
        raise ValueError(f"prompts must be finite, not negative, of shape ({len(lengths)},), not {prompts.shape}")
    if min(job.speed.base_s, job.speed.per_seq_s, job.speed.per_ctx_s) < 0 or job.speed.step_s(1) <= 0:
        raise ValueError(f"a decode step must take time, not {job.speed}")
    if job.max_actors < 1:
        raise ValueError(f"max_actors must be at least 1, not {job.max_actors}")
    if not 0 <= job.prefer <= 1:
        raise ValueError(f"prefer must lie in 0 … 1, not {job.prefer}")
    if min(job.migrate_s, job.start_s) < 0 or job.interval_s <= 0:
        given = f"{job.migrate_s}, {job.start_s}, {job.interval_s}"
        raise ValueError(f"migrate_s and start_s must not be negative and interval_s positive: {given}")
    if job.capacity is not None and (longest := (prompts + lengths).max()) > job.capacity:
        raise ValueError(f"a sequence of {longest:.0f} tokens does not fit an actor of {job.capacity} KV tokens")
