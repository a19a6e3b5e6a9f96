"""The interface of a rollout policy: the job and the view that it gets, and the action that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from placement.speed.decode_speed import Speed


@dataclass(frozen=True)
class RolloutJob:
    """A rollout before its first token.

    scenarios (n, S): joint forecasts in tokens. prompts (n,): tokens. prefer: 0 (cheapest) … 1 (fastest). migrate_s:
    seconds for which a moved sequence does not decode. start_s: seconds from the opening of a lease to its first token.
    capacity: KV tokens an actor holds. interval_s: seconds between two decisions. seed: of policies that split at
    random. group (n,): the prompt of each sequence, None if unknown.
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
    """Progress of a rollout.

    generated (n,): tokens so far (all of them once `finished`). actor (n,): -1 where none holds the sequence.
    ready_s: open actor → when it can decode.
    """

    job: RolloutJob
    time_s: float
    generated: np.ndarray
    finished: np.ndarray
    actor: np.ndarray
    ready_s: dict[int, float]

    @property
    def live(self) -> np.ndarray:
        """Indices of the unfinished sequences."""
        return np.flatnonzero(~self.finished)


@dataclass(frozen=True)
class Action:
    """A policy's answer: the actor of each sequence.

    actor (n,): -1 lets the sequence wait; ignored for finished ones. hold: actors kept, and billed, even while empty.
    Actors neither used nor held are released.
    """

    actor: np.ndarray
    reason: str
    hold: frozenset[int] = frozenset()


class RolloutPolicy(Protocol):
    """Decides at each replan who decodes where."""

    def decide(self, view: View) -> Action | None:
        """Return where each sequence belongs from now on, or None to leave everything as it is."""


def per_seq_ratio(job: RolloutJob, context_tokens: float) -> float:
    """Return what one more sequence adds to a decode step, relative to its base: (per_seq + per_ctx·context) / base."""
    return (job.speed.per_seq_s + job.speed.per_ctx_s * context_tokens) / max(job.speed.base_s, 1e-12)


def cost_weight_of(job: RolloutJob) -> float:
    """Return the weight w of time + w · cost that stands for `prefer`.

    At prefer 0 the square-root law asks for one actor from the first step on (ratio·n / w = 1). At prefer 1 it asks for
    every actor while there are enough sequences (ratio·max_actors / w = max_actors²). In between w is geometric.
    """
    ratio = max(per_seq_ratio(job, float(job.prompts.mean() + job.scenarios.mean() / 2)), 1e-9)
    most, least = ratio * len(job.scenarios), ratio / job.max_actors
    return float(most ** (1 - job.prefer) * least**job.prefer)
