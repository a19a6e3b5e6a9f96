"""Export metrics through Ray, whose agents Prometheus reads on every node. docs/grafana.json is a dashboard of them."""

from __future__ import annotations

import re
from typing import Any

from rlhfless_ray.report.sinks import SinkRun, numbers

PREFIX = "rlhfless_"  # before it Ray puts `ray_`


def exported_name(metric: str) -> str:
    """Return a metric's name in `ray.util.metrics`, without Ray's own prefix."""
    return PREFIX + re.sub(r"\W", "_", metric)


class Prometheus:
    """One gauge for each number of a row, with the run's name as the tag `run`."""

    def __init__(self, run: SinkRun) -> None:
        self._tags, self._gauges = {"run": run.name}, dict[str, Any]()

    def write(self, row: dict[str, Any]) -> None:
        from ray.util.metrics import Gauge

        for key, value in {"step": row.get("step"), **numbers(row)}.items():
            if key not in self._gauges:
                self._gauges[key] = Gauge(exported_name(key), description=f"{key} of the last step", tag_keys=("run",))
            self._gauges[key].set(value, tags=self._tags)

    def close(self) -> None:
        """Ray exports the last values until the process ends."""
