"""The free leases of a run: each held lease has one owner, and one that is lost is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.runtime.step_records import StepRecords
from tests.conftest import small_recipe


class Leases:
    """Grants by hand."""

    def __init__(self) -> None:
        self.held: dict[str, Lease] = {}
        self.pending: dict[str, Any] = {}

    def grant(self, *nodes: str) -> list[Lease]:
        new = [Lease(f"run-{len(self.held) + n}", Slot(node, n)) for n, node in enumerate(nodes)]
        self.held |= {lease.id: lease for lease in new}
        return new

    def release(self, leases: list[Lease]) -> None:
        for lease in leases:
            del self.held[lease.id]


def pool_with(*leases: Lease, name: str = "rollout-1", expected: tuple[str, ...] = ()) -> Any:
    working = [SimpleNamespace(id=name, leases=list(leases))] if leases else []
    return SimpleNamespace(working=working, expected=[SimpleNamespace(id=id) for id in expected])


@pytest.fixture
def broker() -> SlotBroker:
    return SlotBroker(Leases())  # type: ignore[arg-type]


def test_leases_are_taken_once_and_preferred_ones_first(broker: SlotBroker) -> None:
    a, b, c, d = broker.leases.grant("a", "b", "a", "b")  # type: ignore[attr-defined]
    broker.put([a, b, c, d])
    assert broker.take(2, prefer=lambda lease: lease.slot.node == "b") == [b, d]
    assert broker.take(1) == [a] and broker.free == (c,)
    broker.put([a, b])
    broker.release(keep=1)
    assert broker.free == (c,) and list(broker.leases.held.values()) == [c, d]
    assert broker.take() == [c] and broker.take() == []
    broker.put([c, d])
    broker.release(keep=1, sooner=(c.id,))
    assert broker.free == (d,), "another run can use c"


def test_a_resize_uses_free_leases_and_puts_the_others_back(broker: SlotBroker) -> None:
    a, b = broker.leases.grant("a", "a")  # type: ignore[attr-defined]
    broker.put([a, b])
    asked: list[Any] = []

    def resize(count: int, spare: list[Lease], **how: Any) -> list[Lease]:
        asked.append((count, spare, how))
        return spare[count:]

    broker.resize(SimpleNamespace(resize=resize), 1, need=1)  # type: ignore[arg-type]
    assert asked == [(1, [a, b], {"need": 1})] and broker.free == (b,)


def test_leases_of_idle_instances_are_lent_only_while_they_are_idle(broker: SlotBroker) -> None:
    a, b = broker.leases.grant("a", "a")  # type: ignore[attr-defined]
    broker.put([a])
    broker.lend_idle(lambda: [b])
    assert broker.reclaim() == [a, b]
    assert broker.reclaim() == [], "an idle engine is parked once"
    broker.lend_idle(lambda: [b])
    broker.keep_idle()
    assert broker.reclaim() == []


def test_a_lease_with_no_owner_two_owners_or_no_grant_is_named(broker: SlotBroker) -> None:
    a, b, c = broker.leases.grant("a", "a", "b")  # type: ignore[attr-defined]
    broker.put([a])
    engines = pool_with(b, c)
    broker.check("rollout", [engines, pool_with()])
    engines.working[0].leases.remove(c)
    c.holder = "rollout-1"
    with pytest.raises(
        AssertionError, match=r"^leases after score: lease run-2 \(slot 2 of node b, last with rollout-1\) is lost: neither"
    ):
        broker.check("score", [engines])
    broker.put([b, c])
    with pytest.raises(AssertionError, match=r"lease run-1 has 2 owners: free, rollout-1"):
        broker.check("score", [engines])
    broker.leases.release(engines.working.pop().leases)
    with pytest.raises(AssertionError, match=r"lease run-1 of free was released already"):
        broker.check("score", [engines])


def test_a_request_that_nobody_expects_is_named(broker: SlotBroker) -> None:
    broker.leases.pending["run-7"] = None  # type: ignore[assignment]
    broker.check("the end of the step", [pool_with(expected=("run-7",))])
    with pytest.raises(AssertionError, match="no pool waits for the requested lease run-7"):
        broker.check("the end of the step", [pool_with()])


class Counting(SlotBroker):
    """Counts the checks of a run. Loses a lease in the phase that `loses_in` names."""

    checks: list[str]
    loses_in = ""

    def check(self, where: str, pools: Any) -> None:
        if where == self.loses_in:
            self.lost = (self.take(1) or [None])[0]
        super().check(where, pools)
        self.checks.append(where)


@pytest.mark.ray
@pytest.mark.engine
def test_every_lease_of_a_run_has_one_owner_after_every_phase(private_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_ray.runtime.runtime.SlotBroker", Counting)
    monkeypatch.setattr(Counting, "checks", [], raising=False)
    with Runtime(Recipe.parse(small_recipe(tmp_path, run__steps=3))) as run:
        assert isinstance(run.parts.stages.context.broker, Counting)
        for step in run:
            if step.number == 2:
                run.parts.stages.context.broker.loses_in = "score"
                with pytest.raises(AssertionError, match=r"leases after score: lease .* is lost: neither free nor working") as caught:
                    next(iter(run))
                break
    lost = run.parts.stages.context.broker.lost
    assert lost is not None and lost.id in str(caught.value)
    one = ["rollout", "score", "publish", "learn"]
    assert [where for where in Counting.checks if where in one] == [*one, *one, "rollout"]
    assert Counting.checks.count("the end of the step") == 2


@pytest.mark.parametrize(
    ("surplus", "others", "left"),
    [(1, True, 3), (0, True, 2), (0, False, 4)],
    ids=["a run of the pool", "a program beside the pool", "a run that has got its slots since"],
)
def test_slots_are_yielded_to_whoever_still_waits(broker: SlotBroker, surplus: int, others: bool, left: int) -> None:
    broker.put(broker.leases.grant("a", "a", "a", "a"))  # type: ignore[attr-defined]
    wanted = [broker.free[0].id] if surplus else []
    source = SimpleNamespace(view=SimpleNamespace(surplus=surplus, surplus_leases=wanted), others_wait=lambda: others)
    broker.leases.source = source  # type: ignore[assignment]
    StepRecords._yield_slots(SimpleNamespace(stages=SimpleNamespace(context=SimpleNamespace(broker=broker))))  # type: ignore[arg-type]
    assert len(broker.free) == left and not any(lease.id in wanted for lease in broker.free)
