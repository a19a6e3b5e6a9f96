"""What runs and their pool say to each other: whatever is lost, repeated or late, no slot is lost and none has two holders."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ray.exceptions import RayActorError

from placement.market import Bid
from rlhfless_ray.cli.cluster_command import cluster
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.functions import cost_record
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.pool_messages import MESSAGES, OTHER_VERSION, PoolSlot, Reply, RunInfo, RunSlots, SlotRequest, Statement
from rlhfless_ray.functions.pool_state import PoolState
from rlhfless_ray.functions.pool_view import reply_to, view_of
from rlhfless_ray.functions.slot_pool import SAVE_S, SlotPool, UnknownRun
from rlhfless_ray.functions.slot_source import SlotSource
from tests.functions.test_pool_state import pool

NODES = {"a": (3, {}), "b": (2, {})}


def joined(state: PoolState, *names: str) -> list[RunSlots]:
    runs = [RunSlots(name) for name in names]
    for run in runs:
        assert state.join(RunInfo(run.run), 0.0, session=run.session) == []
    return runs


def say(state: PoolState, statement: Statement, now_s: float = 0.0) -> Reply:
    """Deliver a statement."""
    state.tell(statement, now_s)
    state.match(now_s)
    return reply_to(state, statement.run, now_s)


def test_a_request_that_comes_after_its_end_is_not_granted():
    """A rollout's standing request overtakes its withdrawal. Before, the pool granted it to nobody and kept the slot for good."""
    state = pool(1)
    x, y = joined(state, "x", "y")
    x.ask([SlotRequest("x/1", "x")])
    late = x.statement()
    x.end(["x/1"])
    say(state, x.statement())
    assert say(state, late).granted == {} and not state.requests
    y.ask([SlotRequest("y/1", "y")])
    y.accept(say(state, y.statement()))
    assert list(y.held) == ["y/1"] and state.held("x") == 0


def test_a_slot_that_is_granted_while_its_request_ends_is_free_again():
    state = pool(1)
    x, y = joined(state, "x", "y")
    x.ask([SlotRequest("x/1", "x")])
    y.ask([SlotRequest("y/1", "y")])
    reply = say(state, x.statement())
    say(state, y.statement())
    x.end(["x/1"])
    x.accept(reply)  # comes too late
    assert list(reply.granted) == ["x/1"] and not x.held
    say(state, x.statement())
    assert list(say(state, y.statement()).granted) == ["y/1"]


def test_a_grant_is_told_until_the_run_confirms_it():
    state = pool(2)
    [x] = joined(state, "x")
    x.ask([SlotRequest("x/1", "x")])
    say(state, x.statement())  # the reply is lost
    again = say(state, x.statement())
    x.accept(again)
    assert list(again.granted) == ["x/1"] == list(x.held)
    assert say(state, x.statement()).granted == {} and state.held("x") == 1


def test_what_a_process_said_before_its_run_resumed_counts_no_more():
    state = pool(1)
    [old] = joined(state, "x")
    old.ask([SlotRequest("x/1", "x")])
    late = say(state, old.statement())
    [new] = joined(state, "x")
    new.ask([SlotRequest("x/1", "x")])
    new.accept(late)
    assert not new.held
    new.accept(say(state, new.statement()))
    assert list(new.held) == ["x/1"] and state.held("x") == 1


def test_a_run_does_not_pay_for_the_way_of_its_messages():
    """Each slot-second has one payer, and the run's own ledger agrees. Before, the pool also billed the time of messages."""
    state = pool(3)
    [x] = joined(state, "x")
    x.ask(SlotRequest(f"x/{k}", "x") for k in range(3))
    state.tell(x.statement(), 0.0)
    for slot in state.match(0.0):
        slot.granted_s = 1000.0  # wall-clock time, at which the run's ledger begins
    x.accept(reply_to(state, "x", 0.5))
    x.end(["x/0"], 1008.0)
    x.end(["x/1"])  # granted, but too late for the run
    x.statement()  # is lost
    heard = x.statement()
    x.end(["x/2"], 1009.0)
    x.accept(say(state, heard, 10.0))
    assert (view_of(state, "x", 10.0).slot_s, state.free_slot_s) == (18.0, 12.0)
    assert list(x.statement().paid_s) == ["x/2"], "the pool knows of the others"
    say(state, x.statement(), 30.0)
    assert (view_of(state, "x", 30.0).slot_s, state.free_slot_s) == (17.0, 73.0)


def test_a_node_that_a_run_found_lost_is_granted_to_none_of_its_requests():
    state = pool(2, node="a")
    state.set_nodes({"a": (2, {}), "b": (1, {})}, 0.0)
    state.put(PoolSlot("s9", "b", 0), 0.0)
    [x] = joined(state, "x")
    x.ask([SlotRequest("x/1", "x", "a")])
    x.accept(say(state, x.statement()))
    x.avoid(["x/1"])
    x.end(["x/1"])
    x.ask([SlotRequest("x/2", "x"), SlotRequest("x/3", "x")])
    x.accept(say(state, x.statement()))
    assert [slot.node for slot in x.held.values()] == ["b"] and list(x.wants) == ["x/3"]
    assert {slot.id for slot in state.idle(0.0)} == {"s0", "s1"}


class Messages(RuleBasedStateMachine):
    """Runs ask, withdraw, release and bid. Their statements and the replies arrive in any order, twice, or never. Nodes come and go."""

    @initialize()
    def begin(self) -> None:
        self.now, self.asked, self.made = 0.0, 0, 0
        self.state = PoolState(0.0)
        self.state.set_nodes(NODES, 0.0)
        self.runs: dict[str, RunSlots] = {}
        self.sent: list[Statement | Reply] = []
        for name in "xyz":
            self.join(name)
        self.ray_grants()

    def teardown(self) -> None:
        self.all_is_heard()

    def join(self, name: str) -> None:
        """Let a run join with what it holds. If that is gone, it ends, and resumes with nothing."""
        run = self.runs.setdefault(name, RunSlots(name))
        if self.state.join(RunInfo(name, folder=name), self.now, [replace(slot) for slot in run.held.values()], session=run.renew()):
            self.runs[name] = run = RunSlots(name)
            self.state.join(RunInfo(name, folder=name), self.now, session=run.session)

    def knows(self, run: RunSlots) -> bool:
        return run.run in self.state.runs and self.state.runs[run.run].session == run.session

    def deliver(self, message: Statement | Reply) -> None:
        if isinstance(message, Reply):
            for run in self.runs.values():
                run.accept(message)
        elif message.run in self.state.runs and self.state.runs[message.run].session == message.session:
            self.sent.append(say(self.state, message, self.now))

    @rule(name=st.sampled_from("xyz"), count=st.integers(1, 3), node=st.sampled_from(["", "a", "b"]))
    def ask(self, name: str, count: int, node: str) -> None:
        for _ in range(count):
            self.asked += 1
            self.runs[name].ask([SlotRequest(f"{name}/{self.asked}", name, node)])
        self.sent.append(self.runs[name].statement())

    @rule(name=st.sampled_from("xyz"), lost=st.booleans(), data=st.data())
    def end(self, name: str, lost: bool, data: st.DataObject) -> None:
        run = self.runs[name]
        if ids := [*run.wants, *run.held]:
            ended = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
            if lost:
                run.avoid([id for id in ended if id in run.held and run.held[id].node == "b"])
            run.end(ended)
        self.sent.append(run.statement())

    @rule(name=st.sampled_from("xyz"), worth=st.floats(0.1, 50.0))
    def bid(self, name: str, worth: float) -> None:
        self.runs[name].bid = Bid(name, (1, 3), (0.0, worth))
        self.sent.append(self.runs[name].statement())

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), count=st.integers(1, 4), twice=st.booleans())
    def messages_arrive(self, data: st.DataObject, count: int, twice: bool) -> None:
        for _ in range(min(count, len(self.sent))):
            which = data.draw(st.integers(0, len(self.sent) - 1))
            self.deliver(self.sent[which] if twice else self.sent.pop(which))

    @rule(name=st.sampled_from("xyz"))
    def a_heartbeat(self, name: str) -> None:
        if self.knows(run := self.runs[name]):
            run.accept(say(self.state, run.statement(), self.now))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_message_is_lost(self, data: st.DataObject) -> None:
        self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))

    @rule(name=st.sampled_from("xyz"))
    def a_run_is_silent(self, name: str) -> None:
        self.state.leave(name, self.now)

    @rule()
    def the_pool_is_replaced(self) -> None:
        held = [slot for slot in self.state.slots.values() if slot.holder]
        self.state = PoolState(self.now)
        self.state.set_nodes(NODES, self.now)
        assert all(slot.node in NODES for slot in held)

    @rule(node=st.sampled_from(["a", "b"]))
    def a_node_is_lost(self, node: str) -> None:
        self.state.set_nodes({name: found for name, found in NODES.items() if name != node}, self.now)
        self.state.set_nodes(NODES, self.now)  # another one of this name, with other slots

    @rule()
    def ray_grants(self) -> None:
        for node, (count, _) in NODES.items():
            there = {slot.id for slot in self.state.slots.values() if slot.node == node}
            there |= {slot.id for run in self.runs.values() for slot in run.held.values() if slot.node == node}  # a new pool's orphans
            for _ in range(count - len(there)):
                self.made += 1
                self.state.put(PoolSlot(f"s{self.made}", node, self.made), self.now)

    @rule()
    def all_is_heard(self) -> None:
        """After a heartbeat of every run, the pool has of each what it has itself, and no more."""
        for name, run in self.runs.items():
            if not self.knows(run):
                self.join(name)
        for run in self.runs.values():
            say(self.state, run.statement(), self.now)
        for _ in range(2):
            for run in self.runs.values():
                run.accept(say(self.state, run.statement(), self.now))
        for name, run in self.runs.items():
            there = {slot.request: slot.id for slot in self.state.slots.values() if slot.holder == name}
            assert set(there) <= set(run.held)
            for id, slot in run.held.items():
                assert id in there or slot.id not in self.state.slots
            assert {one.id for one in self.state.requests.values() if one.run == name} == set(run.wants)

    @invariant()
    def no_slot_has_two_holders(self) -> None:
        for name, run in self.runs.items():
            for id, slot in run.held.items() if self.knows(run) else ():
                if (known := self.state.slots.get(slot.id)) is not None:  # otherwise its node is lost
                    assert (known.holder, known.request) == (name, id)


TestMessages = Messages.TestCase
TestMessages.settings = settings(max_examples=50, stateful_step_count=40)


def client_of(handle: object) -> PoolClient:
    client = object.__new__(PoolClient)
    SlotSource.__init__(client, "cpu", RunInfo("x"))
    client.closed, client.lost, client.handle = threading.Event(), "", handle
    return client


def test_a_heartbeat_that_fails_ends_the_run_with_its_reason():
    client = client_of(object())  # not an actor
    client._beat()
    with pytest.raises(RunError, match="the heartbeat to the slot pool failed: AttributeError"):
        client.bid(Bid("x", (1,), (0.0,)))


def test_a_heartbeat_that_cannot_find_the_pool_again_ends_the_run_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    """Otherwise only its thread would end, and the pool would take the run for silent."""

    def lose(*_: object) -> None:
        raise RayActorError

    def fail() -> None:
        raise ValueError("the name is taken")

    client = client_of(SimpleNamespace(tell=SimpleNamespace(remote=lose)))
    monkeypatch.setattr(client, "_find", fail)
    client._beat()
    with pytest.raises(RunError, match="the heartbeat to the slot pool failed: ValueError: the name is taken"):
        client.bid(Bid("x", (1,), (0.0,)))


def test_a_run_that_leaves_while_it_joins_again_is_not_in_the_pool(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the pool would keep its slots until it takes the run for silent."""
    joining, calls = threading.Event(), list[str]()

    def lose(*_: object) -> None:
        raise UnknownRun

    def join(*_: object, messages: int) -> tuple[str, list[str]]:
        joining.set()
        time.sleep(0.2)  # for `close`, which does not wait
        calls.append("join")
        return "", []

    client = client_of(None)
    methods = {"tell": lose, "join": join, "leave": lambda _: calls.append("leave")}
    pool = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})
    monkeypatch.setattr(client, "_find", lambda: pool)
    monkeypatch.setattr(client, "say", lambda _: None, raising=False)
    monkeypatch.setattr("rlhfless_ray.functions.pool_client.ray.get", lambda reply, timeout: reply)
    client.thread = threading.Thread(target=client._rejoin, args=(UnknownRun(),))  # as its heartbeat does
    client.thread.start()
    assert joining.wait(5.0)
    client.close()
    assert calls == ["join", "leave"] and not client.thread.is_alive()


def test_a_pool_whose_own_work_fails_ends_so_that_ray_starts_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would go on answering, and grant nothing more."""
    ended: list[int] = []
    monkeypatch.setattr("rlhfless_ray.functions.slot_pool.os._exit", ended.append)
    pool = object.__new__(SlotPool)
    pool.tasks = set()

    async def fail() -> None:
        raise KeyError("a node")

    async def work() -> None:
        pool._begin(asyncio.sleep(0))
        await asyncio.wait(pool.tasks, timeout=10)
        await asyncio.sleep(0)  # its callback
        assert not ended and not pool.tasks
        pool._begin(fail())
        await asyncio.wait(pool.tasks, timeout=10)
        await asyncio.sleep(0)

    asyncio.run(work())
    assert ended == [1] and not pool.tasks and "KeyError: 'a node'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pool_that_stood_still_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may stop all processes for a while. Before, the pool then killed those of every run, without reading their messages."""
    killed: list[str] = []
    monkeypatch.setattr("rlhfless_ray.functions.slot_pool._end_processes", killed.append)
    pool = object.__new__(SlotPool)
    pool.state, pool.orphans, pool._look_at_others, pool._settle = PoolState(time.monotonic()), {}, *[lambda: None] * 2
    pool.state.silent_s = 0.8
    pool.state.join(RunInfo("x", job="1"), time.monotonic())

    async def stand_still() -> None:
        tick = asyncio.create_task(pool._tick())
        await asyncio.sleep(0.3)
        time.sleep(1.2)
        await asyncio.sleep(0.05)
        assert list(pool.state.runs) == ["x"] and not killed
        await asyncio.sleep(1.0)
        tick.cancel()

    asyncio.run(stand_still())
    assert not pool.state.runs and killed == ["1"], "its own silence counts"


def test_a_pool_stores_what_it_has_counted_before_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it died, the hand-overs and free slots since the last run's end were lost."""
    saved: list[int] = []
    monkeypatch.setattr("rlhfless_ray.functions.slot_pool.save_costs", lambda resource, state, *_: saved.append(state.handovers))
    pool = object.__new__(SlotPool)
    pool.resource, pool.state, pool.changed, pool.pool = "cpu", PoolState(0.0), asyncio.Event(), SimpleNamespace(settle=lambda: None)  # type: ignore[assignment]
    pool.counted_from_s, pool.saved, pool.saved_s = 0.0, pool.state.past, time.monotonic()
    pool.state.handovers = 3
    pool._settle()
    assert not saved
    pool.saved_s -= SAVE_S
    pool._settle()
    pool._settle()
    assert saved == [3]


def test_the_costs_that_a_pool_of_another_version_stored_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise no pool would start again on this cluster."""
    stored: dict[bytes, bytes] = {}
    monkeypatch.setattr(cost_record, "_internal_kv_put", lambda key, value, **_: stored.update({key: value}))
    monkeypatch.setattr(cost_record, "_internal_kv_get", lambda key, **_: stored.get(key))
    state = PoolState(0.0)
    state.join(RunInfo("x", price=2.0), 0.0)
    state.leave("x", 8.0)
    cost_record.save_costs("cpu", state, 0.0, 8.0)
    [(key, value)] = stored.items()
    record = json.loads(value)
    record["past"][0]["info"]["tenant"] = "new"
    del record["past"][0]["today_slot_s"], record["day"]
    stored[key] = json.dumps(record).encode()
    known = cost_record.load_costs("cpu")
    assert known is not None and known["past"][0].info == RunInfo("x", price=2.0) and known["past"][0].today_slot_s == 0.0
    assert known["past"][0].ended_s - known["past"][0].joined_s == pytest.approx(8.0)


def test_a_run_of_another_version_is_refused_in_a_sentence() -> None:
    pool = object.__new__(SlotPool)
    refused, _ = asyncio.run(pool.join(RunInfo("x"), "session", []))
    assert "another version of rlhfless-ray" in refused


def test_devices_that_a_run_has_just_released_are_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan right after the release would count their parked engines as cold, because the view of the pool is up to a second old."""
    monkeypatch.setattr("rlhfless_ray.functions.pool_client.ray.get", lambda reply, timeout: reply)
    state = pool(4)
    tell = SimpleNamespace(remote=lambda statement, *how: say(state, statement))
    client = client_of(SimpleNamespace(tell=tell))
    [client.slots] = joined(state, "x")
    leases = LeaseManager("gpu", Ledger("gpu"), 5.0, "x", client, SimpleNamespace(known_going=set))  # type: ignore[arg-type]
    held = leases.take(4, "rollout")
    client.parks({}, frozenset(("a", str(device)) for device in range(4)))
    client.look()
    leases.release(held[1:])
    assert leases.reachable() == {("a", str(device)) for device in range(4)}


def test_the_table_of_a_pool_of_another_version_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlhfless_ray.local.cluster.connect", lambda address, key: None)
    monkeypatch.setattr("rlhfless_ray.common.deadlines.get", lambda status, seconds, what: status)
    state: dict[str, Any] = {"resource": "cpu", "slots": 1, "held": 0, "nodes": {}, "runs": [], "past": []}
    pools = [SimpleNamespace(status=SimpleNamespace(remote=lambda: state))]
    monkeypatch.setattr("rlhfless_ray.functions.slot_pool.find_pools", lambda: pools)
    monkeypatch.setattr("rlhfless_ray.functions.slot_pool.ended_pools", list)
    with pytest.raises(UserError, match="another version of rlhfless-ray; use the same version, or --json"):
        cluster("here", False)
    assert not capsys.readouterr().out
    state["messages"] = MESSAGES
    with pytest.raises(KeyError, match="began_s"):  # a mistake of this version is no other version
        cluster("here", False)


def test_a_run_whose_pool_was_replaced_by_one_of_another_version_ends_with_that_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*_: Any, messages: int) -> tuple[str, list[str]]:
        return OTHER_VERSION, []

    def unknown(*_: Any) -> None:
        raise UnknownRun

    pool = SimpleNamespace(join=SimpleNamespace(remote=join), tell=SimpleNamespace(remote=unknown))
    client = client_of(pool)
    monkeypatch.setattr(client, "_find", lambda: pool)
    monkeypatch.setattr("rlhfless_ray.functions.pool_client.ray.get", lambda reply, timeout: reply)
    client._rejoin(UnknownRun())
    with pytest.raises(RunError, match="another version of rlhfless-ray"):
        client.bid(Bid("x", (1,), (0.0,)))
