"""Which engines hold leases and devices around the phases of a rollout, with processes that only take notes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.request_source import PlainRequests
from rlhfless_ray.rollout.rollout_stage import RolloutStage
from rlhfless_ray.types import WeightVersion


class Notes:
    """An actor that notes the calls it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *asked: self.calls.append(f"load {asked[0]}" if name == "load" else name))


TIMES = SimpleNamespace(warm_start=SimpleNamespace(observe=lambda *_: None), include=lambda terms: None)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> RolloutStage:
    """A stage with three free GPUs, which engines leave as soon as somebody waits for it."""
    monkeypatch.setattr("rlhfless_ray.functions.kept_memory.get", lambda *_: {"memory_mb": 7.0, "spans": []})
    free = [Lease(f"lease-{n}", Slot("node", n)) for n in range(3)]
    leases: Any = SimpleNamespace(resource="gpu", ledger=Ledger("gpu"), held={lease.id: lease for lease in free}, pending={})
    leases.without_lost, leases.take, leases.release = list, lambda *_: [], lambda released: None
    leases.ask_preferred = lambda *_: []
    leases.hand_over = lambda lease, kind, instance: setattr(lease, "holder", instance)
    broker = SlotBroker(leases)
    broker.put(free)
    pool = WorkerPool("rollout", lambda slot: Notes(), leases, 600.0, on_device=True, waits_to_leave=False)
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
    context: Any = SimpleNamespace(
        recipe=recipe,
        leases=leases,
        broker=broker,
        autoscaler=SimpleNamespace(safely=None, steps=SimpleNamespace(takes=lambda measure: True), terms=TIMES, actors=0),
        limits=lambda: Limits({}, {}),
    )
    context.phases, context.record_start_or_replace = SimpleNamespace(phase=lambda name: nullcontext()), lambda *_: True
    return RolloutStage(context, pool, None, partial(PlainRequests, None), 0)  # type: ignore[arg-type]


def roll_out(stage: RolloutStage, actors: int, version: int, goes_on: bool) -> None:
    plan: Any = SimpleNamespace(actors=actors, width=1, pools=())
    with stage.phase(plan, WeightVersion(version, ()), goes_on=lambda: goes_on):
        pass


def test_engines_keep_their_devices_while_a_rollout_goes_on_under_new_weights(stage: RolloutStage) -> None:
    pool, broker = stage.pool, stage.context.broker
    roll_out(stage, 3, version=1, goes_on=True)
    first, second, third = pool.working
    assert broker.free == () and first.actor.calls == ["open", "load 1"], "nobody has left"
    stage.begin(SimpleNamespace(plan=SimpleNamespace(actors=2, width=1, pools=())), WeightVersion(2, ()))  # type: ignore[arg-type]
    assert pool.working == [first, second] and first.actor.calls == ["open", "load 1", "load 2"]
    assert third in pool.parked and third.actor.calls == ["open", "load 1", "park"] and len(broker.free) == 1
    assert len(broker.reclaim()) == 3 and not pool.working, "the learner may take them while they wait"
    assert first.actor.calls[-1] == "park" and first.version is None


def test_engines_leave_their_devices_when_a_rollout_ends_or_something_else_comes_first(stage: RolloutStage) -> None:
    pool, broker = stage.pool, stage.context.broker
    roll_out(stage, 3, version=1, goes_on=False)
    assert not pool.working and len(broker.free) == 3 and all(engine.actor.calls[-1] == "park" for engine in pool.parked)
    roll_out(stage, 3, version=1, goes_on=True)
    kept = list(pool.working)
    assert all(engine.leaving is None for engine in kept), "an engine has left its device before it is woken"
    stage.load(WeightVersion(2, ()))
    roll_out(stage, 3, version=2, goes_on=False)
    assert all(engine.actor.calls[-2:] == ["load 2", "park"] for engine in kept) and not pool.working
    assert len(broker.reclaim()) == 3, "those that were kept have left already"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rollout_beside_an_update_waits_for_slots_no_longer_than_the_update(stage: RolloutStage, hangs: bool) -> None:
    """The learner holds them all, and gives none back while the rollout waits. An update that hangs is found later, by its own deadline."""
    stage.context.broker.take()
    waits = iter([False, False, True])
    if hangs:
        stage.context.recipe = stage.context.recipe.with_settings({"learner.deadline_s": 0.05})
    plan: Any = SimpleNamespace(actors=2, width=1, pools=())
    with stage.phase(plan, WeightVersion(1, ()), ends=lambda: not hangs and next(waits)):
        assert not stage.pool.working
    assert hangs or next(waits, "all asked") == "all asked"
