"""Engines that report nothing, and what the driver does."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import reason_of
from rlhfless_ray.rollout.driver import RolloutDriver
from rlhfless_ray.rollout.engine_calls import EngineCall
from rlhfless_ray.types import WeightVersion
from tests.rollout_drivers import driver_of


def rollout_with(leases: Any) -> RolloutDriver:
    """Without a request, and without engines as yet."""
    return driver_of(SimpleNamespace(leases=leases, working=[]), [], WeightVersion(1, ()))


def test_a_silent_engine_on_an_unreachable_node_counts_as_lost_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before it is silent for too long, and before Ray has seen it; others are left alone."""
    asked, ended, now = list[str](), list[tuple[str, FailureCause]](), time.monotonic()
    rollout = rollout_with(
        SimpleNamespace(deadline_s=60.0, nodes=SimpleNamespace(confirm_lost=lambda node: asked.append(node) or node == "lost"))
    )
    for number, (node, heard_s) in enumerate({"lost": now - 10, "there": now - 10, "talking": now}.items()):
        engine: Any = SimpleNamespace(slot=SimpleNamespace(node=node), started=True)
        rollout.calls.running[node] = EngineCall(engine, number, 1, set(), heard_s, started=True)
    rollout.lost.probed_s = now - 10
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], refs))
    monkeypatch.setattr(rollout.lost, "handle_loss", lambda call, cause, why: ended.append((call.instance.slot.node, cause)))
    rollout.lost.remove_silent()
    assert ended == [("lost", FailureCause.NODE_LOST)] and list(rollout.calls.running) == ["there", "talking"]
    rollout.lost.remove_silent()
    assert sorted(asked) == ["lost", "there"], "it is not asked again at once"


def test_an_engine_that_ray_killed_for_lack_of_memory_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises no RayActorError then, and describes the state of the whole node in many lines."""
    rollout, died = rollout_with(SimpleNamespace()), list[str]()

    def get(ref: Any) -> Any:
        raise OutOfMemoryError("2 worker(s) were killed due to the node running low on memory.\nTop 10 memory users: …")

    answers = iter(["a reference"])
    rollout.calls.running[answers] = EngineCall(cast(Any, SimpleNamespace(loading=None)), 0, 1, set(), 0.0, started=True)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(rollout.lost, "handle_death", lambda call, error: died.append(reason_of(error)))
    rollout.receive([answers])
    assert died == ["2 worker(s) were killed due to the node running low on memory."] and not rollout.calls.running
