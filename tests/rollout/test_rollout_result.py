"""The driver's side of a rollout, on engines that stand in for real ones: what a failed start is called."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.engine.token_deltas import TokenDeltas
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.functions.instance import start_actor
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Request, WeightVersion
from tests.rollout_drivers import driver_of

pytestmark = pytest.mark.ray


def engine_class(fails_in: str) -> type:
    """An engine that fails in one place and, as a real one does, has nothing to work with afterwards. Local, so that Ray
    ships it by value."""

    class Engine:
        def __init__(self) -> None:
            self.engine: Any = None
            if fails_in == "constructor":
                raise ImportError("no module named vllm")

        def open(self, threads: int) -> dict[str, Any]:
            if fails_in == "open":
                raise ValueError("the KV cache is too small;\n   raise rollout.kv_cache_mb")
            if fails_in == "death":
                os._exit(1)
            self.engine = [0]
            return {"memory_mb": 1.0, "spans": []}

        def load(self, version: int, weights: Any, expected: int) -> list[Any]:
            if fails_in == "load":
                self.engine = None
                raise ValueError("weight version 4 arrived damaged")
            self.engine.append(version)
            return []

        def rollout(self, epoch: int, requests: list[Request], interval_s: float, threads: int) -> Iterator[Any]:
            self.engine.append(len(requests))
            if fails_in == "rollout":
                raise RuntimeError("request 0: out of blocks")
            yield TokenDeltas.of(4, [], [], np.zeros(0)), EngineSteps(), []

    return Engine


@pytest.mark.parametrize(
    ("fails_in", "message"),
    [
        ("constructor", r"^rollout engine rollout-\d+ could not start: ImportError: no module named vllm$"),
        ("open", r"^rollout engine rollout-\d+ could not start: the KV cache is too small; raise rollout.kv_cache_mb$"),
        ("death", r"max_replacements = 1 is used up: rollout-\d+ could not start: The actor died unexpectedly"),
        ("load", r"^rollout engine rollout-\d+ could not load its weights: weight version 4 arrived damaged$"),
        ("rollout", r"^rollout engine rollout-\d+ failed: request 0: out of blocks$"),
        ("nothing", r"^rollout engine rollout-\d+ ended without 1 of its responses$"),
    ],
)
def test_the_message_of_a_failed_engine_names_the_first_failure_in_one_line(ray_cluster, fails_in, message):
    ledger = Ledger("cpu", 1.0)
    leases = LeaseManager("cpu", ledger, 60.0, f"stream{time.time_ns()}")
    pool = WorkerPool("rollout", lambda slot: start_actor(engine_class(fails_in), slot, "cpu", {}), leases, 60.0)
    pool.faults = FailureBudget(1)
    try:
        pool.resize(1, [])
        with pytest.raises(RunError, match=message) as raised:
            driver_of(pool, [Request(0, (1,), 0, 4, 1.0)], WeightVersion(4, ()), expected=4.0).run([np.array([0])], deadline_s=60.0)
        assert "\n" not in str(raised.value)
        if fails_in in ("open", "constructor"):  # asked directly, as at the end of a phase
            with pytest.raises(RunError, match=message.replace("^rollout engine ", "^").replace("$", "")):
                pool.working[0].start_result(20.0)
    finally:
        pool.close()
        leases.release_all()
