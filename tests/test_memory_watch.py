"""Measured memory of a run's processes, by function."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from rlhfless_ray.local.memory_watch import MemoryWatch, function_of, memory_metrics

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("title", "function"),
    [
        ("ray::LearnerActor.update", "learner"),
        ("ray::RolloutActor", "engines"),
        ("ray::PageActor.rollout", "engines"),
        ("ray::IDLE", "other workers"),
        ("/somewhere/raylet", "Ray"),
    ],
)
def test_functions_are_known_by_the_titles_of_their_workers(title: str, function: str) -> None:
    assert function_of(title) == function


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
    assert memory_metrics(peaks)["memory/ray_peak_mb"] == round(peaks["Ray"], 1)
    assert watch.take() == {}
