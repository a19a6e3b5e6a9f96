"""What the planner chooses among: pools of actors, and plans that deal sequences out over them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from placement.speed import Speed


@dataclass(frozen=True)
class Pool:
    """Actors of one kind that a plan may use.

    price: cost of one device-second. max_actors: how many may be had. start_s: seconds from lease to first token.
    preempt_per_hour: how often one actor is expected to be taken away. capacity: KV tokens one actor holds (None: no limit).
    devices: devices of one actor (its tensor-parallel width); an actor-second costs price × devices.
    """

    speed: Speed
    price: float = 1.0
    max_actors: int = 1
    start_s: float = 0.0
    preempt_per_hour: float = 0.0
    capacity: int | None = None
    devices: int = 1


@dataclass(frozen=True)
class Plan:
    """One point of the frontier: `groups[i]` holds the indices of the sequences on actor i, which is of pool `pools[i]`.

    time_s: seconds until the last sequence has ended; with scenarios the mean over them. cost: price of all actor-seconds,
    each actor billed until its own last sequence; with scenarios the mean. search_scenarios: columns that the search for
    this partition looked at (0: lengths were known); time_s and cost are always taken over all columns.
    """

    time_s: float
    cost: float
    groups: tuple[np.ndarray, ...]
    pools: tuple[int, ...] = field(default=())
    search_scenarios: int = 0

    @property
    def actors(self) -> int:
        return len(self.groups)
