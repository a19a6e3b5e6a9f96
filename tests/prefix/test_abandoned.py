"""A driver that is killed cannot clean up: its application ends itself, and nobody else's is touched."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.local.laptop.local_ray import forked, local_ray
from tests.conftest import environment

pytestmark = pytest.mark.ray
LIMIT_S = "15"  # for heartbeats: a driver on a busy machine may be held up for some seconds
SCRIPT = str(Path(__file__).with_name("abandoned.py"))


@pytest.fixture
def shared() -> Iterator[str]:
    """The address of a cluster that outlives its drivers. Its end leaves the store of keys to the Ray of other tests (`ray_cluster`)."""
    from ray.cluster_utils import Cluster
    from ray.experimental.internal_kv import _initialize_internal_kv, internal_kv_get_gcs_client

    of_others = internal_kv_get_gcs_client()
    with local_ray():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20})
    yield cluster.address
    cluster.shutdown()
    if of_others is not None:
        _initialize_internal_kv(of_others)


def start(address: str, name: str) -> tuple[subprocess.Popen[str], str]:
    """Start a driver with a service. Returns its process, with which it is killed, and its application's name."""
    command = forked([sys.executable, SCRIPT, address, name, LIMIT_S])
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    return process, answer(process, "rlhfless-prefix-")


def answer(process: subprocess.Popen[str], begins: str) -> str:
    assert process.stdout is not None
    return next(line.strip() for line in process.stdout if line.startswith(begins))


def look(driver: subprocess.Popen[str]) -> dict[str, Any]:
    """The applications and named actors of the cluster, as one of its drivers sees them."""
    print(file=driver.stdin, flush=True)
    return json.loads(answer(driver, "{"))


def test_the_application_of_a_killed_driver_deletes_itself(shared: str) -> None:
    killed, mine = start(shared, "mine")
    living, other = start(shared, "other")
    try:
        assert look(living)["applications"] == sorted([mine, other])
        killed.send_signal(signal.SIGKILL)
        end = time.monotonic() + 200  # the living driver's outlives the limit meanwhile
        while (found := look(living))["applications"] != [other] or any(mine in name for name in found["actors"]):
            assert time.monotonic() < end, found
            time.sleep(0.5)
        assert any(other in name for name in found["actors"])
    finally:
        for process in (killed, living):
            process.kill()
            process.wait(120)
