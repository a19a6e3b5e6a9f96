"""The stage of a step with real leases and stand-ins for engines: from zero and back, billed, and never in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement.measurements.registry import Measurements
from placement.measurements.term import Term
from placement.scaling.prefix_benefit import PrefixSpeed
from rlhfless_ray.common.step_timer import StepTimer
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.instance import Instance, start_actor
from rlhfless_ray.functions.lease import LeaseManager, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.prefix.block_hash import distinct_prefixes
from rlhfless_ray.prefix.prefix_stage import MAX_FAILED_STEPS, MIN_OUTAGE_S, PrefixStage
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import WeightVersion
from tests.prefix.producers import KIND, producer_class

pytestmark = pytest.mark.ray

PROMPTS = [(*range(100, 165), *(i for _ in range(9))) for i in range(8)]
SHARES = [np.repeat(np.arange(8), 2), np.repeat(np.arange(8), 2)]


def slow() -> PrefixSpeed:
    """A token is dear: the service pays."""
    return PrefixSpeed(Term(0.0, 1.0), Term(0.0, 1e-6), Term(0.0, 1e-6), Term(0.0, 1e-6))


@pytest.fixture(scope="module")
def serving(ray_cluster: None) -> Iterator[None]:
    from ray import serve

    yield
    serve.shutdown()  # its controller takes 3 s to start


@pytest.fixture
def make(serving: None) -> Iterator[Callable[..., PrefixStage]]:
    import ray
    from ray import serve

    made: list[tuple[PrefixStage, WorkerPool]] = []

    def build(mode: str = "auto", delay_s: float = 0.0, **more: Any) -> PrefixStage:
        ledger = Ledger("cpu", 3600.0)
        leases = LeaseManager("cpu", ledger, 30.0, f"stage{len(made)}")
        messages: list[str] = []
        recipe = Recipe.parse({"run": {"name": "stage"}, "prompts": {"task": "sort"}, "reward": {"function": "task"}})
        record = SimpleNamespace(progress=SimpleNamespace(message=messages.append))
        scaler = SimpleNamespace(
            terms=Measurements(), criteria=SimpleNamespace(value_per_s=0.0), safely=lambda what, make, otherwise: make()
        )
        context = RunContext(recipe, SlotBroker(leases), StepTimer(lambda *_: None), record, scaler, lambda: Limits({"node": 2}, {1: 2}))  # type: ignore[arg-type]
        fake = producer_class()
        pools = [
            WorkerPool(kind, lambda slot: start_actor(fake, slot, "cpu", {}, delay_s), leases, 300.0) for kind in ("prefill", "rollout")
        ]
        options = {"block_size": KIND.block_size, "page_bytes": KIND.page_bytes, "store_bytes": 10**6, **more}
        stage = PrefixStage(context, pools[0], mode, run_id=f"stage{len(made)}{id(ledger)}", **options)  # type: ignore[arg-type]
        stage.speed, stage.messages, stage.engines = slow(), messages, pools[1]  # type: ignore[attr-defined]
        made.append((stage, pools[1]))
        return stage

    yield build
    for stage, engines in made:
        stage.close()
        stage.context.leases.release(engines.close())
        stage.context.leases.release_all()
        assert not stage.context.leases.held
    assert serve.status().applications == {}
    assert not ray.util.placement_group_table() or all(info["state"] == "REMOVED" for info in ray.util.placement_group_table().values())


def weights(version: int = 1) -> WeightVersion:
    import ray

    return WeightVersion(version, (ray.put({}),))


def engines_of(stage: Any, count: int = 2) -> list[Instance]:
    stage.context.broker.resize(stage.engines, count, need=count)
    stage.context.broker.release()
    return list(stage.engines.working)


def test_a_step_starts_and_parks_its_instance(make: Callable[..., Any]) -> None:
    stage = make("on")
    trie = distinct_prefixes(PROMPTS, KIND.block_size)
    assert not stage.pool.parked and not stage.pool.working
    step = stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights())
    assert step.choice.on and not stage.pool.working and len(stage.pool.parked) == 1, stage.messages
    assert len(stage.context.broker.free) == len(stage.context.leases.held) == 1, "the lease waits for the engines"
    assert step.metrics["prefix/computed_tokens"] == step.metrics["prefix/distinct_tokens"] == trie.distinct_tokens
    engines = engines_of(stage)
    stage.send(step, PROMPTS, engines, SHARES, 1)
    found = stage.finish(step)
    assert found["prefix/fetched"] == 2 * len(trie.nodes)
    assert found["prefix/lost"] == found["prefix/foreign"] == found["prefix/damaged"] == 0
    assert found["prefix/asked_tokens"] == 4 * sum(map(len, PROMPTS)) > found["prefix/off_tokens"] > found["prefix/distinct_tokens"]
    assert found["prefix/header_tokens"] == 64 and found["prefix/measured_saved_engine_s"] > 0
    again = stage.prefill(stage.weigh(PROMPTS, SHARES, 99), PROMPTS, weights())
    assert again.metrics["prefix/computed_tokens"] == 0 and again.prepared.refs, "the same version's pages are there still"
    updated = stage.prefill(stage.weigh(PROMPTS, SHARES, 98), PROMPTS, weights(2))
    assert updated.metrics["prefix/computed_tokens"] == trie.distinct_tokens
    assert stage.pool.cold_starts == 1 and stage.messages == []
    stage.context.ledger.close()
    rows = [row for row in stage.context.ledger.rows if row.kind == "prefill" and row.slots]
    billed_s = sum(row.seconds for row in rows)
    assert billed_s > 0 and sum(row.money for row in rows) == pytest.approx(billed_s, abs=1e-4), "at one a second"
    assert any(row.activity == "work" for row in rows)


def test_auto_starts_nothing_unless_it_pays(make: Callable[..., Any]) -> None:
    stage = make()
    pays = stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights())
    assert pays.choice.on and pays.prepared.refs and "engine-s of prefill" in pays.metrics["prefix/reason"]
    stage = make()
    step = stage.prefill(stage.weigh(PROMPTS[:1], [np.zeros(8, int)], 100), PROMPTS[:1], weights())
    assert not step.choice.on and step.metrics["prefix/on"] == 0.0 and "engine-s of prefill" in step.choice.reason
    assert stage.service.handle is None and not stage.pool.parked and not stage.context.leases.held
    engines = engines_of(stage, 1)
    stage.send(step, PROMPTS[:1], engines, SHARES[:1], 1)
    assert step.sent == [] and "prefix/lost" not in stage.finish(step)


@pytest.mark.parametrize("more, reason", [({"blocked": "it has a sliding window"}, "sliding window"), ({"store_bytes": 2000}, "need 0 MB")])
def test_the_reason_against_prefix_kv_is_logged_once(make: Callable[..., Any], more: dict[str, Any], reason: str) -> None:
    stage = make("on", **more)
    for _ in range(2):
        assert not stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights()).choice.on
    [message] = stage.messages
    assert reason in message and stage.service.handle is None


def test_a_killed_instance_costs_only_its_pages(make: Callable[..., Any]) -> None:
    import ray

    stage = make("on")
    stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights())
    ray.kill(stage.pool.parked[0].actor)
    step = stage.prefill(stage.weigh(PROMPTS, SHARES, 99), PROMPTS, weights(2))
    assert step.choice.on and step.prepared.refs == [] and len(stage.messages) == 1
    assert not stage.pool.parked and not stage.pool.working and stage.pool.faults.used == 1
    engines = engines_of(stage)
    stage.send(step, PROMPTS, engines, SHARES, 2)
    stage.finish(step)
    assert stage.prefill(stage.weigh(PROMPTS, SHARES, 98), PROMPTS, weights(2)).prepared.refs, "the next one starts anew"


def test_a_node_lost_during_a_start_costs_only_the_pages(make: Callable[..., Any]) -> None:
    stage = make("on")
    start = stage.pool.start
    stage.pool.start = lambda slot: start(Slot("ab" * 28, 0))  # Ray reports that it cannot be placed, not that it died
    assert stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights()).prepared.refs == [] and not stage.pool.working
    stage.pool.start = start
    assert stage.prefill(stage.weigh(PROMPTS, SHARES, 99), PROMPTS, weights()).prepared.refs


def test_prefix_kv_is_switched_off_after_repeated_failures(make: Callable[..., Any]) -> None:
    stage = make("on", delay_s="no number")
    for _ in range(MAX_FAILED_STEPS + 1):
        assert stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights()).choice.on, "for a while"
    stage.last_page_s -= MIN_OUTAGE_S
    assert stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights()).choice.on
    off = stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights())
    assert not off.choice.on and f"{MAX_FAILED_STEPS} steps in a row" in off.choice.reason


def test_an_instance_that_cannot_start_is_not_tried_again(make: Callable[..., Any]) -> None:
    stage = make("on", delay_s=None)
    step = stage.prefill(stage.weigh(PROMPTS, SHARES, 100), PROMPTS, weights())
    assert step.prepared.refs == [] and stage.pool.faults.used == 0
    assert not stage.prefill(stage.weigh(PROMPTS, SHARES, 99), PROMPTS, weights()).choice.on and stage.pool.cold_starts == 1
    [message] = stage.messages
    assert "could not start: too little memory" in message and not stage.pool.working and not stage.pool.parked
