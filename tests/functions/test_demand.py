"""Nodes come for what a run announces, and go again: Ray's own autoscaler, whose nodes are processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.functions.cluster_nodes import cluster_slots
from tests.conftest import small_recipe

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.learner, pytest.mark.long, pytest.mark.usefixtures("no_ray")]
MOST = 2  # nodes that may come


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a head with two cores. Up to `MOST` nodes of one core come when they are asked for, and go after 6 s without work."""
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    address = f"{ray.util.get_node_ip_address()}:{port}"
    worker = {"resources": {"CPU": 1, "object_store_memory": 100_000_000}, "node_config": {}, "min_workers": 0, "max_workers": MOST}
    config = {
        "cluster_name": "demand",
        "max_workers": MOST,
        "provider": {"type": "fake_multinode", "gcs_address": address},
        "available_node_types": {"ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0}, "worker": worker},
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
    }
    config |= {f"{who}setup_commands": [] for who in ("", "head_", "worker_")} | {"initialization_commands": []}
    config |= {f"{who}_start_ray_commands": [] for who in ("head", "worker")}
    (folder / "cluster.json").write_text(json.dumps(config))
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    command += [f"--temp-dir={folder}", "--include-dashboard=false", "--object-store-memory=200000000", "--disable-usage-stats"]
    command += ["--dashboard-agent-listen-port=0", "--ray-client-server-port=0", f"--autoscaling-config={folder / 'cluster.json'}"]
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    log = (folder / "head.log").open("w")
    head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: "Ray runtime started" in (folder / "head.log").read_text() or head.poll() is not None, "the head", 60)
        assert head.poll() is None, (folder / "head.log").read_text()
        yield address
    finally:
        ray.shutdown()
        started = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.send_signal(signal.SIGTERM)
        head.wait(30)
        for one in [*started, *(p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or []))]:
            if one.is_running():
                one.kill()


def wait_until(holds: Callable[[], bool], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.2)


def test_nodes_come_for_the_plan_of_a_run_and_go_when_it_has_ended(address: str, tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path,
        run__steps=12,
        cluster__address=address,
        cluster__pool=False,
        functions__demand=True,
        rollout__min_actors=1,
        rollout__max_actors=2 + MOST,
        objective__prefer=1.0,
        evaluate__prompts=0,
    )
    with Runtime(Recipe.parse(recipe)) as run:
        assert cluster_slots("cpu") == 2
        engines = []
        for step in run:
            engines.append(step.plan.actors)
            if step.number == 2:
                wait_until(lambda: cluster_slots("cpu") == 2 + MOST, "further nodes", 90)
        assert max(engines) == 2 + MOST > engines[0]
        ray.init(address=address, ignore_reinit_error=True)
        wait_until(lambda: cluster_slots("cpu") == 2, "end of the further nodes", 90)
