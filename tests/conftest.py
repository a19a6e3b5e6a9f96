"""Shared by all tiers: where things are, a small recipe, and one Ray for the tests that need one."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from hypothesis import settings

import rlhfless_ray  # noqa: F401 - sets what has to be set before grpc is loaded

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("same", derandomize=True)  # what passed here passes everywhere
settings.register_profile("search")  # `pytest --hypothesis-profile=search` looks for more
settings.load_profile("same")

REWARD = '''
def shorter(prompt, response, row):
    """Any reward with a gradient will do: short responses are better."""
    return -len(response) / 10
'''


def small_recipe(folder: Path, **overrides: Any) -> dict[str, Any]:
    """A recipe of a few seconds: four steps, a policy of 0.1 M parameters without warm start, a reward from a file, as many engines
    as it needs (one unless told)."""
    (folder / "reward_file.py").write_text(REWARD)
    tree: dict[str, Any] = {
        "run": {"name": "small", "root": str(folder / "runs"), "steps": 4, "seed": 3},
        "policy": {"hidden_size": 64, "layers": 2},
        "prompts": {"task": "chain", "batch_prompts": 8, "rows": 64},
        "evaluate": {"prompts": 8},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 24, "kv_cache_mb": 64, "max_running": 64},
        "reward": {"function": f"{folder / 'reward_file.py'}:shorter"},
        "learner": {"learning_rate": 0.001},
        "checkpoint": {"every_steps": 2},
        "watch": {"progress": "plain", "tensorboard": False, "wandb": "off", "samples_per_step": 0},
    }
    for key, value in overrides.items():
        section, _, field = key.partition("__")
        tree.setdefault(section, {})[field] = value
    tree["rollout"].setdefault("max_actors", tree["rollout"].get("min_actors", 1))
    return tree


def write_recipe(folder: Path, **overrides: Any) -> str:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(small_recipe(folder, **overrides)))
    return str(path)


def samples(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run `rlhfless …` as a user would and return what it said."""
    return subprocess.run(
        [sys.executable, "-m", "rlhfless_ray", *arguments], capture_output=True, text=True, timeout=400, cwd=more.pop("cwd", ROOT),
        env=environment(), **more,
    )


def environment() -> dict[str, str]:
    """Ours, without a Ray of the machine and with the repository importable from anywhere."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "WANDB_API_KEY")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def lives(process: int) -> bool:
    """Whether a process of that id is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:  # gone, perhaps between opening and reading
        return False


@pytest.fixture
def short_csv_fields() -> Iterator[None]:
    """Python's own limit, whatever a library has made of it in this process."""
    before = csv.field_size_limit(131_072)
    yield
    csv.field_size_limit(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones begin first: files with engines, then with Ray, then all others."""
    ranks: dict[Path, int] = {}
    for item in items:
        rank = 0 if item.get_closest_marker("engine") else 1 if item.get_closest_marker("ray") else 2
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: ranks[item.path])


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that costs minutes to make, for all processes that the tests are spread over: the first to need it makes it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock", timeout=580):
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps with up to two engines from start to end, started as a user starts it."""

    def make(folder: Path) -> None:
        done = command("train", write_recipe(folder, rollout__max_actors=2))
        assert done.returncode == 0, done.stderr
        assert "report.html" in done.stdout

    return made_once(tmp_path_factory, "uninterrupted", make) / "runs" / "small"


@pytest.fixture(scope="module")
def ray_cluster() -> None:
    """One local Ray with four logical cores and four logical GPUs, for all tests of leases and pools. It stays between modules; one
    that needs a Ray of its own ends it (`no_ray`), and the next to need it starts it again."""
    import ray

    from rlhfless_ray.functions.lean_ray import lean_ray

    if not ray.is_initialized():
        with lean_ray():
            ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


@pytest.fixture(scope="module")
def no_ray() -> Iterator[None]:
    """For tests that start a Ray of their own in this process: none before, and none after."""
    import ray

    ray.shutdown()
    yield
    ray.shutdown()


@contextmanager
def two_nodes(head_cpus: int, cpus: int, store_mb: int) -> Iterator[Any]:
    """A cluster of a head, where the driver is, and a second node, to which nodes can be added. Needs `no_ray`. Ray counts a node whose
    connection is refused as lost after 4 s, instead of 15; one that is slow to answer has as long as elsewhere."""
    import ray
    from ray.cluster_utils import Cluster

    from rlhfless_ray.functions.lean_ray import lean_ray

    health = {"health_check_period_ms": 500, "health_check_failure_threshold": 7}
    head = {"num_cpus": head_cpus, "object_store_memory": store_mb * 2**20, "_system_config": health}
    with lean_ray():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=cpus, object_store_memory=store_mb * 2**20)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes(timeout=120)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def two_engines(kind: type, files: dict[str, bytes], settings: dict[str, Any]) -> Iterator[Any]:
    """A pool of two started engines, which ends with the block; needs `ray_cluster`. `kind`: their actor class."""
    from rlhfless_ray.functions.instance import start_actor
    from rlhfless_ray.functions.lease import Leases
    from rlhfless_ray.functions.ledger import Ledger
    from rlhfless_ray.functions.pool import Pool
    from rlhfless_ray.weights.folder import without_weights

    ledger, plain = Ledger("cpu", 1.0), without_weights(files)
    leases = Leases("cpu", ledger, 60.0, f"engines{time.time_ns()}")
    made = Pool("rollout", lambda slot: start_actor(kind, slot, "cpu", {}, plain, settings), leases, ledger, 600.0)
    made.resize(2, [], need=2)
    for instance in made.working:
        instance.told(300.0)
    yield made
    made.close()
    leases.release_all()
