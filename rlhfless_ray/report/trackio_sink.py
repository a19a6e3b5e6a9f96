"""Log to trackio through its own client."""

from __future__ import annotations

from typing import Any


class TrackioRun:
    """A run in trackio. Processes of a resumed run continue the run of the same name."""

    def __init__(self, *, project: str, name: str, recipe: dict[str, Any] | None) -> None:
        import trackio

        self._run = trackio.init(project=project, name=name, config=recipe, resume="allow", embed=False)

    def write(self, row: dict[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
        self._run.log(values, step=row.get("step"))

    def close(self) -> None:
        self._run.finish()
