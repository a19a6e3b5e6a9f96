"""MLflow, trackio and Prometheus beside the file; the dashboard asks for metrics that a run has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfless_ray.recipe import WatchConfig
from rlhfless_ray.report.metrics import Metrics, read_jsonl
from rlhfless_ray.report.sinks import exported_name
from tests.conftest import ROOT

ROWS = [{"step": 1, "reward/mean": 0.25, "plan/reason": "grow"}, {"step": 2, "reward/mean": 0.5, "learn/loss": None}]


def write(folder: Path, **watch: object) -> list[str]:
    (folder / "recipe.yaml").write_text("run: {steps: 2}\nrollout: {top_p: 0.9}\n")
    said: list[str] = []
    settings = WatchConfig(tensorboard=False, wandb="off", run_name="mine", **watch)  # type: ignore[arg-type]
    with Metrics(folder, settings, say=said.append) as metrics:
        for row in ROWS:
            metrics.write(row)
    return said


def test_mlflow_has_the_rows_and_the_recipe_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    for _ in range(2):  # the second time as a resumed run
        assert write(tmp_path, mlflow=str(tmp_path / "mlruns"), mlflow_experiment="tests") == []
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.run_name == "mine" and run.info.status == "FINISHED"
    assert run.data.params["rollout.top_p"] == "0.9"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {(one.step, one.value) for one in history} == {(1, 0.25), (2, 0.5)}


def test_trackio_has_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    assert write(tmp_path, trackio="tests") == []
    assert any((tmp_path / "trackio").rglob("tests*"))


def test_an_evaluation_that_joins_a_row_is_all_that_is_sent_again(tmp_path: Path) -> None:
    got: list[dict[str, object]] = []
    with Metrics(tmp_path, WatchConfig(tensorboard=False, wandb="off")) as metrics:
        metrics._sinks["MLflow"] = SimpleNamespace(write=got.append, close=lambda: None)
        metrics.write({"step": 1, "time_s": 2.0, "learn/loss": 0.5})
        assert metrics.amend({"step": 1, "time_s": 3.0, "eval/loss": 0.4})["learn/loss"] == 0.5
    assert got[1] == {"step": 1, "eval/loss": 0.4}
    assert read_jsonl(tmp_path / "metrics.jsonl")[0] == [{"step": 1, "time_s": 2.0, "eval/loss": 0.4, "learn/loss": 0.5}]


def test_a_sink_that_is_not_installed_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    (line,) = write(tmp_path, trackio="tests")
    assert line.startswith("trackio is off for this run")
    assert len(read_jsonl(tmp_path / "metrics.jsonl")[0]) == 2


def test_prometheus_gets_a_gauge_for_each_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.util.metrics

    values: dict[str, tuple[float, dict[str, str]]] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) and tag_keys == ("run",) and name not in values
            self.name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            values[self.name] = value, tags

    monkeypatch.setattr(ray.util.metrics, "Gauge", Gauge)
    assert write(tmp_path, prometheus=True) == []
    assert values == {"rlhfless_step": (2.0, {"run": "mine"}), "rlhfless_reward_mean": (0.5, {"run": "mine"})}


def test_the_dashboard_asks_for_metrics_that_a_run_has(uninterrupted: Path) -> None:
    rows = read_jsonl(uninterrupted / "metrics.jsonl")[0]
    known = {f"ray_{exported_name(key)}" for row in rows for key, value in row.items() if isinstance(value, (int, float))}
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"] for name in re.findall(r"ray_\w+", target["expr"])}
    assert len(asked) > 15 and asked <= known, asked - known
    assert re.findall(r"ray_\w+", board["templating"]["list"][1]["query"])[0] in known
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
