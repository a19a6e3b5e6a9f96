"""The planner's inputs and outputs: pools of actors, and plans that assign sequences to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from placement.speed.decode_speed import Speed


@dataclass(frozen=True)
class Pool:
    """Actors of one kind that a plan may use.

    Parameters
    ----------
    speed : Speed
        Decode speed of one actor.
    price : float
        Cost of one device-second. An actor-second costs `price * devices`.
    max_actors : int
        Number of actors available.
    start_s : float
        Seconds from lease to first token.
    preempt_per_hour : float
        Expected preemptions of one actor per hour.
    capacity : int, optional
        KV-cache tokens that one actor holds. None means no limit.
    devices : int
        Devices of one actor (tensor-parallel width).
    notice_s : float
        Seconds between the notice of a preemption and the loss. A successor starts within them.
    interval_s : float
        Seconds between two reports of new tokens. A loss with less notice than that regenerates one interval.
    restart_s : float, optional
        Seconds that a successor takes to its first token after a preemption. None: `start_s`.

    Examples
    --------
    >>> from placement import Speed, frontier
    >>> spot = Pool(Speed(0.01, 1e-4), price=0.3, max_actors=2, start_s=5.0, preempt_per_hour=2.0)
    >>> owned = Pool(Speed(0.01, 1e-4), price=1.0, max_actors=4)
    >>> frontier([400, 300, 90], pools=[spot, owned])[-1].pools
    (0,)
    """

    speed: Speed
    price: float = 1.0
    max_actors: int = 1
    start_s: float = 0.0
    preempt_per_hour: float = 0.0
    capacity: int | None = None
    devices: int = 1
    notice_s: float = 0.0
    interval_s: float = 0.0
    restart_s: float | None = None

    @property
    def loss_s(self) -> float:
        """Seconds of an actor that a preemption costs, besides those for weights."""
        restart_s = self.start_s if self.restart_s is None else self.restart_s
        return max(0.0, restart_s - self.notice_s) + (self.interval_s if self.notice_s < self.interval_s else 0.0)


@dataclass(frozen=True)
class Plan:
    """One point of the frontier: an assignment of sequences to actors, with its time and cost.

    Attributes
    ----------
    time_s : float
        Seconds until the last sequence ends. With scenarios, the mean over them. Expected, where actors may be preempted.
    cost : float
        Price of all actor-seconds. Each actor is billed until its own last sequence ends. With scenarios, the mean.
    groups : tuple of ndarray
        `groups[i]` holds the indices of the sequences on actor i.
    pools : tuple of int
        `pools[i]` is the index of the pool of actor i.
    search_scenarios : int
        Number of scenarios that the search looked at (0: lengths were known). `time_s` and `cost` always cover all
        scenarios.

    Examples
    --------
    >>> from placement import Speed, frontier
    >>> plan = frontier([900, 80, 75], Speed(0.01, 1e-4), max_actors=2)[0]
    >>> plan.actors, plan.groups
    (2, (array([0]), array([1, 2])))
    """

    time_s: float
    cost: float
    groups: tuple[np.ndarray, ...]
    pools: tuple[int, ...] = field(default=())
    search_scenarios: int = 0

    @property
    def actors(self) -> int:
        return len(self.groups)
