"""A late engine has its weights from another engine's node: the learner's node sends nothing, and need not even answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from rlhfless_ray.functions.instance import start_actor
from rlhfless_ray.functions.lease import Slot
from rlhfless_ray.functions.replicate import copy_to
from tests.conftest import two_nodes

pytestmark = pytest.mark.ray

SIZE = 8 * 2**20


class Process:
    """Makes and reads arrays."""

    def make(self) -> np.ndarray:
        return np.ones(SIZE, np.uint8)

    def read(self, array: np.ndarray) -> int:
        return int(array.sum())


@pytest.fixture(scope="module")
def nodes(no_ray: None) -> Iterator[Any]:
    with two_nodes(1, 1, 128) as cluster:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=128 * 2**20)
        cluster.wait_for_nodes(timeout=120)
        yield cluster


def where(ref: Any) -> set[str]:
    return set(ray.experimental.get_object_locations([ref])[ref]["node_ids"])


def test_the_learners_node_sends_nothing_to_a_late_engine(nodes: Any) -> None:
    learner, holder, late = nodes.worker_nodes
    actor = {node.node_id: start_actor(Process, Slot(node.node_id, 0), "cpu", {}) for node in (learner, holder, late)}
    weights = actor[learner.node_id].make.remote()
    assert ray.get(actor[holder.node_id].read.remote(weights), timeout=150) == SIZE, "an engine has loaded them"
    assert where(weights) == {learner.node_id, holder.node_id}
    ray.get(actor[late.node_id].read.remote(np.zeros(1)), timeout=150)  # its process has started
    copy, copied = copy_to(weights, holder.node_id)
    ray.get(copied, timeout=150)
    raylet = learner.all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    try:
        assert ray.get(actor[late.node_id].read.remote(copy), timeout=60) == SIZE
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert where(copy) == {holder.node_id, late.node_id} and late.node_id not in where(weights)
