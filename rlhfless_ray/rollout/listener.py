"""Tell a run about its rollout: finished samples, and the progress."""

from __future__ import annotations

from collections.abc import Callable

from rlhfless_ray.rollout.events import Event, RolloutProgress, SamplesMade
from rlhfless_ray.rollout.live_rollout import Plugin
from rlhfless_ray.types import Sample

OnSamples = Callable[[list[Sample]], None]


class RolloutListener(Plugin):
    def __init__(self, on_progress: Callable[[int, int], None], on_samples: OnSamples = lambda new: None) -> None:
        """`on_progress`: called with the number of finished and of all responses. `on_samples`: called with finished samples."""
        self.on_progress, self.on_samples = on_progress, on_samples

    def on_event(self, event: Event) -> None:
        if isinstance(event, SamplesMade):
            self.on_samples(event.samples)
        elif isinstance(event, RolloutProgress):
            self.on_progress(event.done, event.total)
