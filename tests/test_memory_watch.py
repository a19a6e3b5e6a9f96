"""Measured memory of a run's processes, by function."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from rlhfless_ray.local.memory_watch import MemoryWatch, function_of, memory_metrics
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.report.cost_charts import memory_settings, memory_table

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("title", "function"),
    [
        ("ray::LearnerActor.update", "learner"),
        ("ray::ExactEngineActor", "engines"),
        ("ray::StockEngineActor.rollout", "engines"),
        ("VLLM::EngineCore", "engines"),
        ("ray::RayTrainWorker.poll_status", "learner"),
        ("ray::IDLE", "other workers"),
        ("ray::DrafterActor.train", "drafter"),
        ("python -m rlhfless_ray.engine.engine_member 1", "engines"),
        ("python -m rlhfless_ray.reward.reward_model_member", "reward"),
        ("/somewhere/raylet", "Ray"),
    ],
)
def test_functions_are_known_by_the_titles_of_their_workers(title: str, function: str) -> None:
    assert function_of(*title.split()) == function


def test_peaks_are_kept_until_they_are_taken() -> None:
    watch = MemoryWatch(private=True, job="")
    watch.close()
    holds = "import sys; x = bytearray(b'1' * 50_000_000); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        watch.sample()
        assert child.stdin is not None
        child.stdin.close()
    time.sleep(0.05)
    watch.sample()
    peaks = watch.take()
    assert peaks["Ray"] >= 50 and peaks["driver"] > 1  # the child has no title of a worker
    assert peaks["total"] >= peaks["driver"] + 50
    assert memory_metrics(peaks, {}, {})["memory/ray_peak_mb"] == round(peaks["Ray"], 1)
    assert watch.take() == {}


def test_the_report_has_least_predicted_and_measured_memory_by_function() -> None:
    rows = [
        memory_metrics({"learner": 9000.0, "engines": 2000.0, "total": 12000.0}, {"learner": 8900.0}, {"learner": 9600.0}),
        {"step": 2},  # too short for a look
        memory_metrics({"learner": 9400.0, "engines": 2000.0, "total": 11000.0}, {"learner": 8900.0}, {"learner": 9600.0}),
    ]
    assert memory_table(rows) == [
        {"name": "learner", "least": 8.9, "predicted": 9.6, "median": 9.2, "most": 9.4},
        {"name": "engines", "least": None, "predicted": None, "median": 2.0, "most": 2.0},
        {"name": "all together", "least": None, "predicted": None, "median": 11.5, "most": 12.0},
    ]
    assert memory_table([{"step": 1}]) == []
    assert memory_settings([{"memory/settings": "smaller"}, {"step": 2}]) == "smaller" and memory_settings(rows) == ""


def test_least_memory_is_that_of_the_plan() -> None:
    recipe = Recipe.parse(
        {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"dtype": "bfloat16"}, "learner": {"zero_stage": 1}}
    )
    found = RunMemory.of(recipe, policy=({"num_hidden_layers": 24, "hidden_size": 896}, 494_000_000)).least_mb()
    assert found["learner"] == pytest.approx(494 * 18, rel=1e-3), "weights 2, float32 weights 4, moments 8, gradients 4 bytes"
    assert found["engines"] == pytest.approx(494 * 2 + recipe.rollout.engine_kv_mb * 1.048576)
