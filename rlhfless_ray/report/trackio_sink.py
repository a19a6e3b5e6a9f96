"""Log to trackio through its own client."""

from __future__ import annotations

from typing import Any

from rlhfless_ray.report.sinks import SinkRun, numbers


class TrackioRun:
    """A run in trackio. Processes of a resumed run continue the run of the same name."""

    def __init__(self, run: SinkRun) -> None:
        import trackio

        self._run = trackio.init(project=run.watch.trackio, name=run.name, config=run.recipe, resume="allow", embed=False)

    def write(self, row: dict[str, Any]) -> None:
        self._run.log(numbers(row), step=row.get("step"))

    def close(self) -> None:
        self._run.finish()
