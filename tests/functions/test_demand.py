"""Nodes come for what a run announces, and go again: Ray's own autoscaler, whose nodes are processes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from rlhfless_ray.functions.cluster_nodes import cluster_slots
from tests.test_faults import Hit, built, go, recipe_of

pytestmark = [pytest.mark.ray, pytest.mark.long]
MOST = 2  # nodes that may come


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def autoscaled(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A head with two cores. Up to `MOST` nodes of one core come when they are asked for, and go after 6 s without work."""
    folder, port = Path(tempfile.mkdtemp()), free_port()  # sockets need a short path
    address = f"{ray.util.get_node_ip_address()}:{port}"
    worker = {"resources": {"CPU": 1, "object_store_memory": 100_000_000}, "node_config": {}, "min_workers": 0, "max_workers": MOST}
    provider = dict.fromkeys(("use_node_id_as_ip", "launch_multiple", "disable_node_updaters", "disable_launch_config_check"), True)
    config = {
        "cluster_name": "demand",
        "max_workers": MOST,
        "provider": {"type": "fake_multinode", "gcs_address": address, **provider},
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
    command += [
        "--dashboard-agent-listen-port=0",
        f"--ray-client-server-port={free_port()}",
        f"--autoscaling-config={folder / 'cluster.json'}",
    ]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    log = (folder / "head.log").open("w")
    head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: "Ray runtime started" in (folder / "head.log").read_text() or head.poll() is not None, "the head", 60)
        assert head.poll() is None, (folder / "head.log").read_text()
        ray.init(address=address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        started = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.send_signal(signal.SIGTERM)
        head.wait(30)
        for one in [*started, *(p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or []))]:
            if one.is_running():
                one.kill()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(holds: Callable[[], bool], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.2)


def test_nodes_come_for_the_plan_of_a_run_and_go_when_it_has_ended(autoscaled: None, tmp_path: Path) -> None:
    """More engines are faster: the time of a token is that of the sequences beside it."""
    world = built(tmp_path, base_s=2e-3, per_seq_s=4e-3)
    of_functions, of_cluster = {"demand": True, "max_replacements": 0}, {"pool": False}
    objective = {"prefer": 1.0}
    recipe = recipe_of(world, tmp_path, actors=2 + MOST, steps=5, objective=objective, functions=of_functions, cluster=of_cluster)

    def wait_for_nodes(run: Hit) -> None:
        wait_until(lambda: cluster_slots("cpu") == 2 + MOST, "further nodes", 90)

    run = go(Hit(recipe, {(2, "update"): wait_for_nodes}))
    plans = [row["plan/actors"] for row in run.rows()]
    assert plans[0] <= 2 and max(plans[2:]) == 2 + MOST, plans
    wait_until(lambda: cluster_slots("cpu") == 2, "end of the further nodes", 90)
