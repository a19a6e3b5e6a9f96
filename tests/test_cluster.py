"""On clusters that outlive the run: another node, the driver's folders gone, engines killed, nothing left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util.placement_group import placement_group_table
from safetensors.numpy import load_file

from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.local.laptop.local_ray import forked
from tests.conftest import ROOT, environment, samples, small_recipe, two_nodes, write_recipe
from tests.run_files import rows

pytestmark = [pytest.mark.ray, pytest.mark.engine]


@pytest.fixture
def uncollected():
    """Python's collector does not happen to come by: what the run forgets has to go by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def cluster(no_ray: None):
    """A head without cores, where the driver is, and a second node with all of them."""
    with two_nodes(0, 2, 256) as cluster:
        yield cluster


def node_states(cluster) -> dict[str, int]:
    """{node id: milliseconds for which Ray's autoscaler sees the node idle}; 0 is busy."""
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    from ray.core.generated.autoscaler_pb2 import ClusterResourceState

    state = get_cluster_resource_state(ray._raylet.GcsClient(address=cluster.gcs_address))
    assert isinstance(state, ClusterResourceState)
    return {node.node_id.hex(): node.idle_duration_ms for node in state.node_states}


def test_a_run_on_another_node_survives_a_killed_engine_and_leaves_nothing(cluster, tmp_path, uninterrupted, uncollected):
    folder = tmp_path / "before"
    folder.mkdir()
    tree = small_recipe(folder, cluster__pool=True)
    tree["run"]["root"] = str(tmp_path / "runs")
    run = Runtime(Recipe.parse(tree))
    folder.rename(tmp_path / "renamed")  # the reward file and all else the driver read are gone from where they were
    seen_nodes = set()
    with run:
        stages = run.parts.stages
        for step in run:
            seen_nodes |= {instance.slot.node for pool in (stages.rollout.pool, stages.learn.worker_group.pool) for instance in pool.parked}
            if step.number == 2:
                victim = stages.rollout.pool.parked[0]
                os.kill(ray.get(victim.actor.__ray_call__.remote(lambda self: os.getpid())), 9)
            assert step.metrics["reward/mean"] is not None and step.ledger["full_slot_s"] > 0
    here = ray.get_runtime_context().get_node_id()
    assert seen_nodes and here not in seen_nodes
    for step in range(1, 5):  # neither the node nor the engine that died changed a token
        assert [s["response"] for s in samples(run.folder.path, step)] == [s["response"] for s in samples(uninterrupted, step)]
    assert rows(run.folder.path)[-1]["step"] == 4

    assert [info["name"] for info in placement_group_table().values() if info["state"] != "REMOVED"] == []
    assert [actor["ActorClassName"] for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"] == []
    deadline = time.monotonic() + 90
    while min(node_states(cluster).values()) == 0 and time.monotonic() < deadline:
        time.sleep(0.5)
    idle = node_states(cluster)
    assert min(idle.values()) > 0, "a node is still busy in the eyes of Ray's autoscaler"
    while any((now := node_states(cluster))[node] <= before for node, before in idle.items()) and time.monotonic() < deadline:
        assert min(now.values()) > 0, "it does not stay idle"
        time.sleep(0.5)
    assert all(now[node] > before for node, before in idle.items()), "it does not stay idle"


def test_two_runs_on_one_pool_learn_what_each_learns_alone(cluster, tmp_path, uninterrupted):
    """They work side by side, and neither samples another token for it."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        name, address = folder.name, cluster.address
        write_recipe(folder, run__name=name, cluster__pool=True, cluster__address=address, rollout__max_actors=2)
    beside = forked([sys.executable, "-m", "rlhfless_ray", "train", str(folders[1] / "small.yaml")])
    other = subprocess.Popen(beside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment())
    try:
        with Runtime(Recipe.load(folders[0] / "small.yaml")) as run:
            assert run.shared_pool is not None
            deadline = time.monotonic() + 120
            while run.shared_pool.view.runs < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            together = [step.number for step in run if run.shared_pool.view.runs == 2]
        said = other.communicate(timeout=300)[0]
        assert other.returncode == 0, said
    finally:
        other.kill()
        other.wait()
    assert together
    alone = load_file(uninterrupted / "model" / "model.safetensors")
    for folder in folders:
        mine = folder / "runs" / folder.name
        for step in range(1, 5):
            assert [s["response"] for s in samples(mine, step)] == [s["response"] for s in samples(uninterrupted, step)]
        learned = load_file(mine / "model" / "model.safetensors")
        for key, weight in alone.items():
            np.testing.assert_allclose(learned[key].astype(np.float32), weight.astype(np.float32), rtol=1e-3, atol=1e-5)


def test_more_slots_than_the_cluster_has_are_refused_before_anything_starts(cluster, tmp_path):
    from rlhfless_ray.common.errors import UserError

    run = Runtime(Recipe.parse(small_recipe(tmp_path, learner__ranks=5)))
    with pytest.raises(UserError, match=r"learner.ranks: 5 slots at once, but the cluster has 2 \(CPU cores\)"):
        run.__enter__()
    assert not Path(tmp_path / "runs").exists()
