"""Wall time of a step by phase, as the driver measures it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Count seconds per phase since the last `take`. Time outside of phases is the driver's own work."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce = announce
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.started = time.monotonic()

    @contextmanager
    def phase(self, name: str, shown: str = "") -> Iterator[None]:
        self.announce(shown or name)
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - start

    def take(self) -> tuple[dict[str, float], float]:
        """Return ({phase: seconds}, wall seconds) since the last call, and start again from zero."""
        now = time.monotonic()
        wall, self.started = now - self.started, now
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds, wall
