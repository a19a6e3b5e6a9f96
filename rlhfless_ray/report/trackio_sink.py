"""Log to trackio through its own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class TrackioRun:
    """A run in trackio. Processes of a resumed run continue the run of the same name."""

    def __init__(self, folder: Path, *, project: str, name: str) -> None:
        import trackio

        recipe = folder / "recipe.yaml"
        config = yaml.safe_load(recipe.read_text()) if recipe.is_file() else None
        self._run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)

    def write(self, row: dict[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
        self._run.log(values, step=row.get("step"))

    def close(self) -> None:
        self._run.finish()
