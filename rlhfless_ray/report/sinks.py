"""Interface of the destinations of metrics besides the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import yaml

from rlhfless_ray.recipe import WatchConfig

MAX_ERROR_CHARS = 400  # characters of an error in messages


class Sink(Protocol):
    """A destination of rows. Its constructor takes a SinkRun."""

    def write(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass
class SinkRun:
    """Properties of the run that sinks receive."""

    folder: Path
    watch: WatchConfig
    resume_after_step: int | None
    say: Callable[[str], None]

    @property
    def name(self) -> str:
        return self.watch.run_name or self.folder.name

    @cached_property
    def recipe(self) -> dict[str, Any] | None:
        """The recipe of the run folder, None if there is none."""
        file = self.folder / "recipe.yaml"
        return yaml.safe_load(file.read_text()) if file.is_file() else None


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, without the step."""
    return {key: float(value) for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
