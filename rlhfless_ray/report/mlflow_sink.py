"""Log to MLflow through its own client."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rlhfless_ray.report.sinks import SinkRun, numbers

AT_ONCE, MOST_CHARACTERS = 100, 500  # MLflow's limits on parameters


class MlflowRun:
    """A run in MLflow, whose parameters are the recipe. A resumed run continues the one whose id is in the run folder's `mlflow_run`."""

    def __init__(self, run: SinkRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse folders otherwise
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri, experiment = run.watch.mlflow, run.watch.mlflow_experiment
        self._client = MlflowClient(tracking_uri=uri if "://" in uri else Path(uri).resolve().as_uri())
        file = run.folder / "mlflow_run"
        if file.is_file():
            self._id = file.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing is not None else self._client.create_experiment(experiment)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        file.write_text(self._id)
        parameters = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in _flat(run.recipe or {}).items()]
        for first in range(0, len(parameters), AT_ONCE):
            self._client.log_batch(self._id, params=parameters[first : first + AT_ONCE])

    def write(self, row: dict[str, Any]) -> None:
        now, step = int(1000 * time.time()), int(row.get("step", 0))
        values = [self._metric(key, value, now, step) for key, value in numbers(row).items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
