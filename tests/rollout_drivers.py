"""Drivers of small rollouts. Not collected by pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from placement.scaling.resize_policy import Decision, Hold
from rlhfless_ray.rollout.driver import RolloutDriver
from rlhfless_ray.rollout.events import Event, RolloutProgress
from rlhfless_ray.rollout.live_rollout import DriverSettings, Plugin, RequestSource
from rlhfless_ray.rollout.migration_policy import MigrationPolicy
from rlhfless_ray.rollout.request_source import PlainRequests, WantedResponses
from rlhfless_ray.types import Request, WeightVersion


class Watch(Plugin):
    """Calls a function with the number of finished and of all responses."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self.on_progress = on_progress

    def on_event(self, event: Event) -> None:
        if isinstance(event, RolloutProgress):
            self.on_progress(event.done, event.total)


def driver_of(
    pool: Any,
    source: RequestSource | list[Request],
    weights: WeightVersion,
    *,
    expected: Any = 0.0,
    needed_next: int = 1,
    decide: Callable[[float, bool], Decision] = lambda tail_s, needed: Hold(1, "kept"),
    give_back: Callable[[Any, Decision], None] = lambda instance, decision: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    migration: MigrationPolicy | None = None,
    plugins: Sequence[Plugin] = (),
    interval_s: float = 0.1,
    silence_s: float = 60.0,
    waits: bool = True,
) -> RolloutDriver:
    """Return a driver. `source`: a list are plain requests with `expected` tokens. The others are `DriverSettings`."""
    if isinstance(source, list):
        lengths = np.broadcast_to(np.asarray(expected, float), len(source)).copy()
        source = PlainRequests(None, WantedResponses(source, [], lengths, weights.version))
        source.samples.add = lambda ended: []  # type: ignore[method-assign]  # without prompts
    moves = [] if migration is None else [migration]
    settings = DriverSettings(interval_s, silence_s, needed_next, decide, give_back, waits=waits)
    return RolloutDriver(pool, source, weights, settings, plugins=[Watch(on_progress), *plugins, *moves])
