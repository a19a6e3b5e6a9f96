"""What a rollout policy is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from placement.speed import Speed


@dataclass(frozen=True)
class Job:
    """What is known before the first token: n sequences, S joint scenarios of their lengths, and what things take.

    scenarios (n, S) tokens; prompts (n,) tokens; prefer 0 (cheapest) … 1 (fastest); capacity: KV tokens an actor holds.
    group (n,): the prompt of each sequence (None: not known).
    """

    scenarios: np.ndarray
    speed: Speed
    max_actors: int
    prefer: float = 0.5
    migrate_s: float = 0.0
    start_s: float = 0.0
    prompts: np.ndarray = field(default_factory=lambda: np.zeros(1))
    capacity: int | None = None
    interval_s: float = 0.1
    seed: int = 0
    group: np.ndarray | None = None


@dataclass(frozen=True)
class View:
    """Progress now. generated (n,) tokens so far (all of them once `finished`); actor (n,), -1 where none holds the sequence;
    paused_until (n,): when a moved sequence decodes again; ready_s: open actor → when it can decode."""

    job: Job
    time_s: float
    generated: np.ndarray
    finished: np.ndarray
    actor: np.ndarray
    paused_until: np.ndarray
    ready_s: dict[int, float]

    @property
    def live(self) -> np.ndarray:
        """Indices of the sequences that have not finished."""
        return np.flatnonzero(~self.finished)


@dataclass(frozen=True)
class Action:
    """Where each sequence goes. actor (n,): -1 for none (it waits; ignored for finished sequences). hold: actors kept, and
    billed, even while empty. Actors that are neither used nor held are released."""

    actor: np.ndarray
    reason: str
    hold: frozenset[int] = frozenset()


def slope(job: Job, context_tokens: float) -> float:
    """What one more sequence adds to a decode step, over the step's base: (per_seq + per_ctx·context) / base."""
    return (job.speed.per_seq_s + job.speed.per_ctx_s * context_tokens) / max(job.speed.base_s, 1e-12)


def weight(job: Job) -> float:
    """μ of time + μ·cost that `prefer` stands for.

    At prefer 0 the square-root law asks for one actor from the first step on (slope·n / μ = 1), at prefer 1 for every
    actor while there are sequences enough (slope·max_actors / μ = max_actors²); in between μ is geometric.
    """
    most, least = _range(job)
    return float(most ** (1 - job.prefer) * least**job.prefer)


def prefer_of(mu: float, job: Job) -> float:
    """The `prefer` at which `weight` is μ, clipped to 0 … 1."""
    most, least = _range(job)
    if most <= least:
        return 1.0
    return float(np.clip(np.log(most / mu) / np.log(most / least), 0, 1))


def _range(job: Job) -> tuple[float, float]:
    ratio = max(slope(job, float(job.prompts.mean() + job.scenarios.mean() / 2)), 1e-9)
    return ratio * len(job.scenarios), ratio / job.max_actors
