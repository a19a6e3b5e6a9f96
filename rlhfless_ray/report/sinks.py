"""Destinations of metrics besides the file, each through its own client, which is imported when a run uses it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rlhfless_ray.common.errors import one_line_with_type
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import WatchConfig
from rlhfless_ray.recipe.yaml_text import read_yaml
from rlhfless_ray.report.openrlhf_names import Shown

MAX_ERROR_CHARS = 400  # characters of an error in messages
COLUMNS: list[str | int] = ["global_step", "text", "reward"]
MAX_SAMPLES = 200  # rows of the table, which is rewritten at every step: without a limit its cost is quadratic in the steps
PARAMETERS_AT_ONCE, MAX_PARAMETER_CHARS = 100, 500  # MLflow's limits
PROMETHEUS_PREFIX = "rlhfless_"  # before it Ray puts `ray_`


class Sink(Protocol):
    """A destination of rows. Its constructor takes a SinkRun."""

    def write(self, row: JsonObject) -> None: ...

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
    def recipe(self) -> JsonObject | None:
        """The recipe of the run folder, None if there is none."""
        file = self.folder / "recipe.yaml"
        return read_yaml(file.read_text()) if file.is_file() else None


def numbers(row: JsonObject) -> dict[str, float]:
    """Return the metrics that are numbers, without the step."""
    return {key: float(value) for key, value in row.items() if key != "step" and isinstance(value, (int, float))}


class TensorBoard:
    """Write one scalar per number of a row, and a sample's text, under the row's `step`. Not thread-safe.

    After a resume TensorBoard hides values that an earlier process wrote for later steps. Its own writer imports in 0.4 s.
    torch.utils.tensorboard and tensorboardX take 2.7 s each, because both import torch, which the driver does not need.
    """

    def __init__(self, run: SinkRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary

        def text(tag: str, words: str) -> Any:
            """Encode a text as torch.utils.tensorboard's add_text does."""
            plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
            content = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[words.encode()])
            content.tensor_shape.dim.add(size=1)
            return self._summary.Value(tag=f"{tag}/text_summary", tensor=content, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin))

        self._text = text
        root = run.watch.tensorboard_path
        folder = Path(root) / run.name if root else run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder), max_queue_size=64, flush_secs=5)
        if run.resume_after_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=run.resume_after_step + 1, session_log=start))

    def write(self, row: JsonObject) -> None:
        step = row.get("step")
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in numbers(row).items()]
        values += [
            self._text(key, f"Sample:\n{shown.text}\n\nReward: {shown.reward:.4f}")
            for key, shown in row.items()
            if isinstance(shown, Shown)
        ]
        if isinstance(step, int) and values:
            self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbRun:
    """A Weights & Biases run of this process, online or offline, whose config is the recipe. Files go to the run folder's `wandb/`.

    Processes of a resumed run share the group. They plot over `step`, or with OpenRLHF's names over `train/global_step` and
    `eval/global_step`.
    """

    def __init__(self, sink_run: SinkRun) -> None:
        import wandb

        watch, say = sink_run.watch, sink_run.say
        online = watch.wandb == "online" or (watch.wandb == "auto" and bool(os.environ.get("WANDB_API_KEY")))
        try:
            run = _start_wandb(sink_run, online)
        except Exception as error:  # no login or network: log offline instead
            if watch.wandb != "online":
                raise
            say(f"cannot log to Weights & Biases online ({one_line_with_type(error, MAX_ERROR_CHARS)})")
            online, run = False, _start_wandb(sink_run, online=False)
        # Steps of a resumed run start again from a checkpoint; wandb's own counter would refuse to go back.
        run.define_metric("*", step_metric="step")
        for section in ("train", "eval") if watch.metric_names == "openrlhf" else ():
            run.define_metric(f"{section}/*", step_metric=f"{section}/global_step")
        self._run, self._wandb = run, wandb
        self._samples: list[tuple[object, ...]] = []  # the newest
        if not online:
            say(f"Weights & Biases is offline: `wandb sync {Path(run.dir).parent}` uploads the run")
        elif getattr(run, "url", None):
            say(f"Weights & Biases: {run.url}")

    def write(self, row: JsonObject) -> None:
        logged: JsonObject = {"step": row["step"], **numbers(row)}
        for key, shown in row.items():
            if isinstance(shown, Shown):
                self._samples.append((row["step"], *shown))
                del self._samples[:-MAX_SAMPLES]
                logged[key] = self._wandb.Table(columns=COLUMNS, data=self._samples)  # a table is logged only once
        self._run.log(logged)

    def close(self) -> None:
        self._run.finish()


def _start_wandb(run: SinkRun, online: bool) -> Any:
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",  # do not capture the terminal's output
        disable_git=True,
        disable_code=True,
        init_timeout=60,
        finish_timeout=60,
    )
    return wandb.init(
        project=run.watch.wandb_project,
        name=run.name,
        group=run.watch.wandb_group or run.folder.name,
        entity=run.watch.wandb_entity,
        dir=str(run.folder),
        mode="online" if online else "offline",
        config=run.recipe,
        settings=settings,
    )


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
        parameters = [Param(key, str(value)[:MAX_PARAMETER_CHARS]) for key, value in _flat(run.recipe or {}).items()]
        for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=parameters[first : first + PARAMETERS_AT_ONCE])

    def write(self, row: JsonObject) -> None:
        now, step = int(1000 * time.time()), int(row.get("step", 0))
        values = [self._metric(key, value, now, step) for key, value in numbers(row).items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(tree: JsonObject, prefix: str = "") -> JsonObject:
    flat: JsonObject = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class TrackioRun:
    """A run in trackio. Processes of a resumed run continue the run of the same name."""

    def __init__(self, run: SinkRun) -> None:
        import trackio

        self._run = trackio.init(project=run.watch.trackio, name=run.name, config=run.recipe, resume="allow", embed=False)

    def write(self, row: JsonObject) -> None:
        self._run.log(numbers(row), step=row.get("step"))

    def close(self) -> None:
        self._run.finish()


def exported_name(metric: str) -> str:
    """Return a metric's name in `ray.util.metrics`, without Ray's own prefix."""
    return PROMETHEUS_PREFIX + re.sub(r"\W", "_", metric)


class Prometheus:
    """Export metrics through Ray, whose agents Prometheus reads on every node. docs/grafana.json is a dashboard of them.

    One gauge for each number of a row, with the run's name as the tag `run`.
    """

    def __init__(self, run: SinkRun) -> None:
        self._tags, self._gauges = {"run": run.name}, JsonObject()

    def write(self, row: JsonObject) -> None:
        from ray.util.metrics import Gauge

        for key, value in {"step": row.get("step"), **numbers(row)}.items():
            if key not in self._gauges:
                self._gauges[key] = Gauge(exported_name(key), description=f"{key} of the last step", tag_keys=("run",))
            self._gauges[key].set(value, tags=self._tags)

    def close(self) -> None:
        """Ray exports the last values until the process ends."""
