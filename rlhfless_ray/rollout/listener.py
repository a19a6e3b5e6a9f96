"""Tell a run about its rollout: make samples of finished responses, and report the progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from rlhfless_ray.rollout.events import Event, ResponsesEnded, RolloutProgress, SamplesMade
from rlhfless_ray.rollout.live_rollout import Plugin
from rlhfless_ray.types import Sample

OnSamples = Callable[[list[Sample]], None]


class Samples(Protocol):
    """Samples of completions or of agents' episodes."""

    def add(self, ended: Iterable[Any]) -> list[Sample]: ...

    def all(self) -> list[Sample]: ...

    def metrics(self) -> dict[str, Any]: ...


class RolloutListener(Plugin):
    def __init__(
        self, samples: Samples, on_samples: OnSamples = lambda new: None, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """`on_samples`: called with finished samples. `on_progress`: called with the number of finished and of all responses."""
        self.samples, self.on_samples, self.on_progress = samples, on_samples, on_progress

    def on_event(self, event: Event) -> None:
        if isinstance(event, ResponsesEnded):
            new = self.samples.add(event.ended)
            self.on_samples(new)
            self.rollout.emit(SamplesMade(new))
        elif isinstance(event, RolloutProgress):
            self.on_progress(event.done, event.total)

    def metrics(self, before: Mapping[str, Any]) -> dict[str, Any]:
        return self.samples.metrics()
