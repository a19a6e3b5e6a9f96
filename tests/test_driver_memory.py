"""The driver holds no whole model, though it opens, publishes, checkpoints and exports one."""

from __future__ import annotations

import gc
import re
import threading
import tracemalloc
from pathlib import Path

import pytest

from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tiny_model import scratch_policy
from tests.conftest import small_recipe

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.learner]


def private_bytes() -> int:
    """Return this process's memory without pages of files and of the object store."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def most_private_bytes(recipe: Recipe) -> int:
    """Run the recipe, and return the most private memory that this process took, or the peak of Python's and numpy's if that is more.

    A busy machine may miss a short peak of the first, but none of the second.
    """
    gc.collect()
    before, most, done = private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], private_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    tracemalloc.start()
    try:
        with Runtime(recipe) as run:
            for _ in run:
                pass
    finally:
        done.set()
        watcher.join()
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return max(most[0], traced)


def test_the_driver_holds_no_model(private_ray: None, tmp_path: Path) -> None:
    """The first run imports what the driver needs. The second one's weights have 100 MB, and its checkpoints three times as much."""
    wide = {"policy__hidden_size": 512, "policy__layers": 8}
    folder, runs = tmp_path / "policy", {"run__steps": 2, "checkpoint__every_steps": 1}
    write_folder(folder, scratch_policy(Recipe.parse(small_recipe(tmp_path, **wide)), task("chain")))
    size = (folder / "model.safetensors").stat().st_size
    assert size > 100e6
    most_private_bytes(Recipe.parse(small_recipe(tmp_path, **runs)))
    taken = most_private_bytes(Recipe.parse(small_recipe(tmp_path, **runs, policy__path=str(folder))))
    assert (tmp_path / "runs" / "small-2" / "checkpoints" / "step_2").exists() and taken < 0.5 * size, (
        f"{taken / 1e6:.0f} MB beside weights of {size / 1e6:.0f} MB"
    )
