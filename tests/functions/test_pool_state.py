"""The state of the slots that runs share: no slot is lost or has two holders, and every slot-second has one payer."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from placement.market import Bid
from rlhfless_ray.functions.pool_messages import SILENT_S, PoolSlot, PoolView, RunInfo, SlotRequest
from rlhfless_ray.functions.pool_state import HEARD_S, IDLE_S, RECENT_S, WARM_IDLE_S, PoolState
from rlhfless_ray.functions.pool_view import view_of

NODES = {"a": (3, {"zone": "1"}), "b": (2, {})}


def pool(slots: int = 4, node: str = "a", now_s: float = 0.0) -> PoolState:
    state = PoolState(now_s)
    state.set_nodes({node: (slots, {})}, now_s)
    for k in range(slots):
        state.put(PoolSlot(f"s{k}", node, k), now_s)
    return state


def pool_view() -> PoolView:
    return PoolView(0, 1, 0, 0, 0, 0.0, "", 0.0, 0.0, 0.0)


def ask(state: PoolState, run: str, count: int, now_s: float, start: int = 0) -> list[str]:
    ids = [f"{run}/{start + k}" for k in range(count)]
    for id in ids:
        state.ask(SlotRequest(id, run), now_s)
    return ids


class SharedSlots(RuleBasedStateMachine):
    """Runs come and go, ask, bid, release, and fall silent, nodes come and go, and Ray grants slots, in any order."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.state = PoolState(0.0)
        self.state.set_nodes(NODES, 0.0)
        self.made, self.asked = 0, 0
        self.joined: dict[str, float] = {}
        self.pending: list[str] = []
        self.counted: Counter[str] = Counter()  # slot-seconds, counted apart
        self.total = 0.0

    def wait(self, seconds: float) -> None:
        for slot in self.state.slots.values():
            self.counted[slot.holder] += seconds
        self.total += seconds * len(self.state.slots)
        self.now += seconds

    @rule(seconds=st.floats(0.01, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.wait(seconds)

    @rule(run=st.sampled_from("xyz"), share=st.sampled_from([None, 0.25, 0.5, 0.75]), least=st.integers(1, 6))
    def join(self, run: str, share: float | None, least: int) -> None:
        info = RunInfo(run, share, least=least, folder=run)
        if run in self.state.runs:
            return
        if not self.state.refusal(info, self.now):
            assert self.state.join(info, self.now) == []

    @rule(run=st.sampled_from("xyz"))
    def leave(self, run: str) -> None:
        self.state.leave(run, self.now)
        assert not any(slot.holder == run for slot in self.state.slots.values())

    @rule(run=st.sampled_from("xyz"), count=st.integers(1, 4), node=st.sampled_from(["", "a", "b"]))
    def ask(self, run: str, count: int, node: str) -> None:
        if run not in self.state.runs:
            return
        for _ in range(count):
            self.asked += 1
            self.state.ask(SlotRequest(f"{run}/{self.asked}", run, node), self.now)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = [f"{run}/{k}" for run in "xyz" for k in range(1, self.asked + 1)]
        self.state.release(data.draw(st.lists(st.sampled_from(ids), max_size=5)), self.now)

    @rule(run=st.sampled_from("xyz"), worth=st.lists(st.floats(0.1, 50.0), min_size=1, max_size=4), least=st.integers(0, 2))
    def bid(self, run: str, worth: list[float], least: int) -> None:
        if run in self.state.runs:
            slots = tuple(range(least, least + len(worth) + 1))
            self.state.bid(Bid(run, slots, (0.0, *np.cumsum(worth))), self.now)

    @rule()
    def ray_grants(self) -> None:
        room = Counter({node: count for node, (count, _) in self.state.nodes.items()})
        room.subtract(slot.node for slot in self.state.slots.values())
        for node, count in room.items():
            if count > 0:
                self.made += 1
                self.state.put(PoolSlot(f"slot{self.made}", node, self.made), self.now)
                return

    @rule()
    def match(self) -> None:
        before = {id: slot.holder for id, slot in self.state.slots.items()}
        targets, held = self.state.clearing().slots, Counter(before.values())
        for slot in self.state.match(self.now):
            assert before[slot.id] == "" and slot.request not in self.state.requests
        for request in self.state.requests.values():  # work-conserving: what is below its target gets what fits
            if held[request.run] < targets[request.run] and sum(r.run == request.run for r in self.state.requests.values()) == 1:
                free = [slot for slot in self.state.slots.values() if not slot.holder and request.node in ("", slot.node)]
                assert not free

    @rule(node=st.sampled_from(["a", "b"]))
    def lose_a_node(self, node: str) -> None:
        gone = self.state.set_nodes({name: found for name, found in NODES.items() if name != node}, self.now)
        assert all(slot.node == node for slot in gone)

    @rule()
    def nodes_are_back(self) -> None:
        self.state.set_nodes(NODES, self.now)

    @rule()
    def idle_slots_go(self) -> None:
        for slot in self.state.idle(self.now):
            assert not slot.holder
            self.state.drop(slot.id, self.now)

    @rule(heard=st.lists(st.sampled_from("xyz"), max_size=3))
    def the_silent_end(self, heard: list[str]) -> None:
        for run in heard:
            if run in self.state.runs:
                self.state.runs[run].heard_s = self.now
        for info in self.state.silent(self.now):
            assert info.run not in heard
            self.state.leave(info.run, self.now)

    @invariant()
    def every_slot_has_one_holder_and_every_second_one_payer(self) -> None:
        state = self.state
        state.account(self.now)
        for slot in state.slots.values():
            assert (slot.holder in state.runs) != (slot.holder == "") and (slot.request != "") == (slot.holder != "")
        granted = [slot.request for slot in state.slots.values() if slot.holder]
        assert len(set(granted)) == len(granted) and not set(granted) & set(state.requests)
        assert all(request.run in state.runs for request in state.requests.values())
        paid = sum(run.slot_s for run in state.runs.values()) + sum(past.slot_s for past in state.past)
        assert paid + state.free_slot_s == pytest.approx(self.total, abs=1e-6)
        assert state.free_slot_s == pytest.approx(self.counted[""], abs=1e-6)
        for run in state.runs.values():
            past = sum(one.slot_s for one in state.past if one.info.run == run.info.run)
            assert run.slot_s + past == pytest.approx(self.counted[run.info.run], abs=1e-6)
        cleared = state.clearing().slots
        assert set(cleared) == set(state.runs) and sum(cleared.values()) <= max(state.size, 0)


TestSharedSlots = SharedSlots.TestCase
TestSharedSlots.settings = settings(max_examples=40)


def test_a_slot_goes_first_to_a_run_below_its_target_and_a_release_may_be_repeated():
    state = pool(4)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
    ids = ask(state, "x", 4, 0.0)
    assert len(state.match(0.0)) == 4
    [wanted] = ask(state, "y", 1, 1.0)
    more = ask(state, "x", 1, 1.0, start=9)
    state.release(ids[:1], 2.0)
    [slot] = state.match(2.0)
    assert slot.request == wanted and state.handovers == 1
    state.release(ids[:1], 3.0)  # the same release again: the slot is another run's now
    assert slot.holder == "y" and state.match(3.0) == [] and more[0] in state.requests


def test_a_run_finds_the_slots_that_it_had():
    state = pool(4)
    state.join(RunInfo("x"), 0.0), state.join(RunInfo("y"), 0.0)
    x, y = ask(state, "x", 2, 0.0), ask(state, "y", 2, 0.0)
    where = {slot.request: slot.id for slot in state.match(0.0)}
    state.release([*y, *x], 1.0)
    [again] = ask(state, "x", 1, 1.0, start=5)
    assert {slot.id for slot in state.match(1.0)} <= {where[id] for id in x} and again not in state.requests


def test_a_run_that_is_silent_loses_its_slots_and_one_that_speaks_does_not():
    state = pool(2)
    state.join(RunInfo("x"), 0.0), state.join(RunInfo("y"), 0.0)
    ask(state, "x", 1, 0.0), ask(state, "y", 1, 0.0)
    state.match(0.0)
    state.runs["y"].heard_s = SILENT_S
    assert [info.run for info in state.silent(SILENT_S + 1)] == ["x"]


def test_a_run_that_comes_back_has_paid_for_its_silence():
    """Before, it went on with what it had last heard of, and nobody had paid for its slots until they were taken from it."""
    state, info = pool(2), RunInfo("x", folder="/runs/x", job="1")
    state.join(info, 0.0)
    ask(state, "x", 2, 0.0)
    state.match(0.0)
    heard = view_of(state, "x", 5.0)
    state.leave("x", 5.0 + SILENT_S)
    state.join(info, 40.0, before=heard)
    assert view_of(state, "x", 50.0).slot_s == view_of(state, "x", 50.0).today_slot_s == 2 * (5.0 + SILENT_S) and not state.past


def test_time_in_which_the_pool_itself_stood_still_is_no_silence():
    """Otherwise it would kill the processes of every run, whose messages it has not read yet."""
    state = pool(2)
    for name, heard_s in (("x", 0.0), ("y", 90.0)):
        state.join(RunInfo(name), heard_s)
    state.was_held_up(80.0, 100.0)
    assert [state.runs[name].heard_s for name in "xy"] == [80.0, 100.0]
    assert [info.run for info in state.silent(80.0 + SILENT_S + 1)] == ["x"]


def test_a_run_in_a_folder_of_the_same_path_on_another_machine_does_not_end_the_first():
    state, info = pool(2), RunInfo("x", folder="/runs/x", job="1")
    state.join(info, 0.0)
    other = replace(info, job="2")
    assert "a run in a folder named x is on this cluster already" in state.refusal(other, 1.0, lambda job: job == "1")
    assert state.refusal(other, 1.0) == "", "its driver has died, and it resumes"
    assert state.refusal(other, HEARD_S + 1, lambda job: True) == "", "Ray does not know yet that the driver's node is lost"
    assert state.refusal(info, 1.0, lambda job: True) == "", "it joins again after its pool was lost"


def test_a_run_that_joins_a_replaced_pool_goes_on_with_fewer_nodes_than_there_were():
    info = RunInfo("x", least=3)
    assert pool(2).refusal(info, 0.0) == "the run needs 3 slots at once, but the pool has 2"
    assert pool(2).refusal(info, 0.0, is_new=False) == ""


def test_a_view_says_what_the_other_runs_keep_parked_and_can_be_shown() -> None:
    state = pool()
    for name in "xyz":
        state.join(RunInfo(name), 0.0)
        state.runs[name].parked_mb = {"a": 100.0, name: 50.0}
    assert asdict(view_of(state, "x", 1.0))["parked_mb"] == {"a": 200.0, "y": 50.0, "z": 50.0}


def test_a_free_slot_goes_back_to_ray_after_a_while():
    state = pool(2)
    assert state.idle(IDLE_S) == [] and len(state.idle(IDLE_S + 0.1)) == 2
    state.join(RunInfo("x"), 0.0)
    state.runs["x"].warm = frozenset({("a", "1")})
    assert [slot.device for slot in state.idle(IDLE_S + 0.1)] == [0], "a process waits on the other one"
    assert len(state.idle(3.0, 2.0, keeps_warm=False)) == 2, "somebody waits in Ray's queue"
    assert len(state.idle(IDLE_S + 0.1, IDLE_S, keeps_warm=False)) == 2 and len(state.idle(3.0, 2.0)) == 1
    assert len(state.idle(WARM_IDLE_S + 0.1)) == 2


def test_runs_that_need_more_than_is_left_take_turns():
    """Two runs need three slots each of a pool of four. The one that waits longer comes first, the other one pauses."""
    state = pool(4)
    for name in ("x", "y"):
        state.join(RunInfo(name, least=3), 0.0)
    x = ask(state, "x", 3, 0.0)
    assert len(state.match(0.0)) == 3 and state.clearing().slots == {"x": 3, "y": 0}
    ask(state, "y", 3, 1.0)
    assert len(state.match(1.0)) == 1 and state.clearing().slots == {"x": 0, "y": 3}
    view = view_of(state, "x", 1.0)
    assert view.surplus == 2 and view.waiting == ("y",) and "waits for its turn" in view.reason
    state.release(x, 2.0)
    assert len(state.match(2.0)) == 2 and state.held("y") == 3


@pytest.mark.parametrize(("slots", "names"), [(3, "xy"), (8, "xyz")])
def test_runs_take_turns_with_a_slot_that_belongs_to_several(slots, names):
    """Two runs of equal share own half of the third slot each. Before, the first by name had it for good, and owed nothing."""
    state, end_s, asked = pool(slots), 3000, 0
    for name in names:
        state.join(RunInfo(name), 0.0)
        state.bid(Bid(name, tuple(range(1, slots + 1)), tuple(20.0 * k for k in range(slots))), 0.0)
    for now in range(0, end_s, 5):
        for name in names:
            missing = slots - state.held(name) - sum(request.run == name for request in state.requests.values())
            asked += len(ask(state, name, missing, now, asked))
        state.match(now)
        for name in names:
            mine = [slot.request for slot in state.slots.values() if slot.holder == name]
            state.release(mine[: view_of(state, name, now).surplus], now)
        state.match(now)
    paid = [view_of(state, name, end_s).slot_s for name in names]
    assert max(paid) - min(paid) < 0.1 * sum(paid) / len(paid) and state.handovers < end_s / 40
    assert max(paid) - min(paid) == pytest.approx(np.ptp([state.credits.of(name) for name in names]), rel=0.1, abs=1.0)


def test_a_run_that_starts_does_not_pause_for_one_that_waits():
    """It gives its slot back half a minute later. Before, x waited so long for y, while z held the other slot step after step."""
    state = pool(2)
    for name, now_s in (("y", 0.0), ("z", 1.0), ("x", 2.0)):
        state.join(RunInfo(name), now_s)
        ask(state, name, 1, now_s)
        state.match(now_s)
    assert state.clearing().slots == {"x": 1, "y": 0, "z": 1}
    for name in "xz":
        state.bid(Bid(name, (1, 2), (0.0, 5.0)), 3.0)
    assert state.clearing().slots == {"x": 1, "y": 1, "z": 0} and view_of(state, "z", 3.0).surplus == 1
    state.bid(Bid("y", (1,), (0.0,)), 4.0)
    assert state.clearing().slots == {"x": 1, "y": 0, "z": 1}, "it has started"


def test_a_run_keeps_its_turn_until_it_has_all_slots_that_it_needs():
    """Slots come one at a time. Before, two waiting runs got one each, and neither ever a second one."""
    state = pool(2)
    for name in "xyz":
        state.join(RunInfo(name, least=2), 0.0)
    x = ask(state, "x", 2, 0.0)
    state.match(0.0)
    ask(state, "y", 2, 1.0), ask(state, "z", 2, 2.0)
    for k, now_s in enumerate((3.0, 4.0)):
        state.release(x[k : k + 1], now_s)
        state.match(now_s)
    assert (state.held("y"), state.held("z")) == (2, 0)
    assert state.clearing().slots == {"x": 0, "y": 0, "z": 2} and view_of(state, "y", 4.0).surplus == 2, "it is another one's turn"


def test_a_run_with_some_of_the_slots_that_it_needs_gets_its_turn_too():
    """Before, a run whose update had left it one slot waited forever for the second one of its engines."""
    state = pool(3)
    for name, count, now_s in (("x", 1, 0.0), ("y", 2, 5.0)):
        state.join(RunInfo(name), 0.0)
        ask(state, name, count, now_s)
        state.match(now_s)
        state.bid(Bid(name, (2, 3), (0.0, 9.0)), now_s)
    ask(state, "x", 1, 10.0, start=1), ask(state, "y", 1, 10.0, start=2)
    state.match(10.0)
    assert (view_of(state, "x", 10.0).surplus, view_of(state, "y", 10.0).surplus) == (0, 2)


def test_a_run_is_asked_for_slots_of_nodes_that_the_waiting_run_can_use():
    """A learner waits for the node of its state. Before, another run gave slots of other nodes, took them again, and so on without end."""
    state = PoolState(0.0)
    state.set_nodes({"a": (2, {}), "b": (2, {"zone": "1"})}, 0.0)
    for k, node in enumerate("aabb"):
        state.put(PoolSlot(f"s{k}", node, k), 0.0)
    state.join(RunInfo("x"), 0.0), state.join(RunInfo("y"), 0.0)
    state.bid(Bid("y", (1, 2, 3), (0.0, 5.0, 9.0)), 0.0)
    x = ask(state, "x", 4, 0.0)
    assert len(state.match(0.0)) == 4 and view_of(state, "x", 0.0).surplus == 0
    state.ask(SlotRequest("y/1", "y", "a"), 1.0)
    state.match(1.0)
    assert (view_of(state, "x", 1.0).surplus, nodes_of(state, "x", 1.0)) == (2, {"a"})
    state.release(["y/1"], 2.0)
    assert nodes_of(state, "x", 2.0) == {"a"}, "it asks again after a moment"
    state.ask(SlotRequest("y/2", "y", labels={"zone": "2"}), 2.0)
    state.match(2.0)
    assert (view_of(state, "x", 2.0).surplus, nodes_of(state, "x", 2.0)) == (0, set())
    state.release(["y/2", *x[:1]], 3.0)
    state.ask(SlotRequest("y/3", "y", labels={"zone": "1"}), 3.0)
    state.match(3.0)
    assert nodes_of(state, "x", 3.0) == {"b"}


def nodes_of(state: PoolState, run: str, now_s: float) -> set[str]:
    """Nodes of the slots that a run should give back."""
    wanted = view_of(state, run, now_s).surplus_leases
    return {slot.node for slot in state.slots.values() if slot.request in wanted}


def test_a_learner_gets_back_the_device_of_its_state_and_no_other_one():
    """Before, it took every free device of the node, and held them, until the right one came."""
    state = pool(3)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
        state.bid(Bid(name, (1, 2), (0.0, 9.0)), 0.0)
    _, second = ask(state, "y", 2, 0.0)
    state.match(0.0)
    device = state.leased.get(second).device
    state.ask(SlotRequest("x/1", "x", "a", device=device), 1.0)
    assert not state.match(1.0), "another device is free"
    assert state.has_device(state.requests["x/1"]), "Ray need not be asked for it"
    view = view_of(state, "y", 1.0)
    assert (view.held, view.surplus, view.surplus_leases) == (2, 1, (second,)), "although it has no more than its target"
    state.release([second], 2.0)
    state.ask(SlotRequest("y/3", "y"), 2.0)
    assert sorted(slot.request for slot in state.match(2.0)) == ["x/1", "y/3"] and state.leased.get("x/1").device == device
    assert view_of(state, "y", 2.0).surplus == 0


def test_others_get_the_device_of_a_learners_state_last():
    state = pool(3)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
    state.ask(SlotRequest("x/1", "x", "a", device=0), 0.0)
    state.match(0.0)
    state.release(["x/1"], 1.0)
    ask(state, "y", 2, 1.0)
    assert [slot.device for slot in state.match(1.0)] == [1, 2]
    ask(state, "y", 1, 2.0, start=2)
    state.match(2.0)
    state.release(["y/2", "y/0"], 3.0)
    ask(state, "y", 1, 4.0, start=3)
    assert [slot.device for slot in state.match(4.0)] == [1], "although it held both last"


def test_a_run_gets_the_devices_of_its_parked_processes():
    """On another device an engine starts cold: on one pool, runs started 88 engines where each on its part of the devices started 61."""
    state = pool(4)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
    state.runs["x"].warm, state.runs["y"].warm = frozenset({("a", "2"), ("a", "3")}), frozenset({("a", "0")})
    ask(state, "x", 3, 0.0)
    assert [slot.device for slot in state.match(0.0)] == [2, 3, 1], "and of the others one without a process of another run"
    state.release([f"x/{number}" for number in range(3)], 1.0)
    ask(state, "y", 2, 1.0)
    assert [slot.device for slot in state.match(1.0)] == [0, 1], "although another run was the last to hold it"
    assert view_of(state, "x", 1.0).warm_free == (("a", "2"), ("a", "3")) and view_of(state, "y", 1.0).warm_free == ()


def test_a_device_that_went_back_to_ray_is_still_free_for_its_parked_process():
    """Plans counted its engine as cold, and after five idle minutes a run did not start it again."""
    state = pool(2)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
    state.runs["x"].warm = frozenset({("a", "0"), ("a", "1"), ("gone", "0")})
    for slot in state.idle(301.0):
        state.drop(slot.id, 301.0)
    assert not state.slots and view_of(state, "x", 301.0).warm_free == (("a", "0"), ("a", "1"))
    state.put(PoolSlot("s2", "a", 1), 302.0)
    ask(state, "y", 1, 302.0)
    assert state.match(302.0) and view_of(state, "x", 302.0).warm_free == (("a", "0"),)


def test_a_device_that_another_run_borrows_comes_back_and_one_of_its_share_does_not():
    """Plans counted engines on both as warm. Without the borrowed ones, a run would shrink whenever it has lent slots beside its update."""
    state = pool(4)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
    state.runs["x"].warm = frozenset({("a", "0"), ("a", "1"), ("a", "3")})
    ask(state, "y", 3, 0.0)
    assert {slot.device for slot in state.match(0.0)} == {0, 1, 2}
    view = view_of(state, "x", 1.0)
    assert view.warm_free == (("a", "3"),) and view.warm_lent == (("a", "0"),)
    state.runs["y"].info = RunInfo("y", share=0.75)
    state.bid(Bid("y", (1, 4), (0.0, 9.0)), 1.0)
    assert view_of(state, "x", 1.0).warm_lent == ()


def test_a_run_gives_back_the_devices_of_the_waiting_runs_processes():
    state = pool(4)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
        state.bid(Bid(name, (1, 4), (0.0, 9.0)), 0.0)
    held = ask(state, "x", 4, 0.0)
    state.match(0.0)
    ask(state, "y", 1, 1.0)
    assert view_of(state, "x", 1.0).surplus == 1 and view_of(state, "x", 1.0).surplus_leases == tuple(held)
    state.runs["y"].warm = frozenset({("a", "2")})
    assert view_of(state, "x", 1.0).surplus_leases == (held[2],)
    ask(state, "y", 1, 1.0, start=1)
    state.bid(Bid("y", (1, 2), (0.0, 99.0)), 1.0)
    assert view_of(state, "x", 1.0).surplus == 2 and view_of(state, "x", 1.0).surplus_leases == tuple(held), "one device is not enough"


def test_what_a_run_gives_back_serves_every_waiting_run():
    """One has processes on more of its devices than it lacks. Both of them would leave nothing for the other one."""
    state = pool(4)
    state.set_nodes({"a": (4, {}), "b": (1, {})}, 0.0)
    state.put(PoolSlot("s4", "b", 0), 0.0)
    for name in "xyz":
        state.join(RunInfo(name), 0.0)
    state.bid(Bid("x", (1, 2, 3, 4, 5), (0.0, 9.0, 18.0, 27.0, 36.0)), 0.0)
    held = ask(state, "x", 5, 0.0)
    assert len(state.match(0.0)) == 5
    state.runs["y"].warm = frozenset({("a", "2"), ("a", "3")})
    for name, node in (("y", "a"), ("z", "b")):
        state.ask(SlotRequest(f"{name}/0", name, node), 1.0)
    state.match(1.0)
    view, on_b = view_of(state, "x", 1.0), next(slot.request for slot in state.slots.values() if slot.node == "b")
    on = {slot.request: slot.device for slot in state.slots.values() if slot.node == "a"}
    assert view.surplus == 2 and len(view.surplus_leases) == 2 and on_b in view.surplus_leases and set(view.surplus_leases) <= set(held)
    assert {on[request] for request in view.surplus_leases if request in on} <= {2, 3}


def test_two_learners_with_one_device_do_not_ask_each_other_for_it_below_their_targets():
    state = pool(2)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
        state.ask(SlotRequest(f"{name}/1", name, "a", device=0), 0.0)
        state.match(0.0)
    assert state.leased.get("x/1") and view_of(state, "x", 0.0).surplus == 0, "y waits until x has finished"
    state.release(["x/1"], 1.0)
    state.match(1.0)
    assert state.leased.get("y/1")


def test_a_run_that_has_withdrawn_keeps_its_turn_only_for_a_moment():
    """Otherwise it would stand before those that wait, without taking a slot itself."""
    state = pool(3)
    for name in ("x", "y", "z"):
        state.join(RunInfo(name, least=3), 0.0)
    ask(state, "x", 3, 0.0)
    assert len(state.match(0.0)) == 3
    y = ask(state, "y", 3, 1.0)
    state.match(1.0)
    state.release(y, 2.0)
    state.match(2.0 + RECENT_S)
    assert state.clearing().slots == {"x": 0, "y": 3, "z": 0}
    ask(state, "z", 3, 5.0)
    state.match(5.0)
    assert state.clearing().slots == {"x": 0, "y": 0, "z": 3} and view_of(state, "x", 5.0).surplus == 3
    ask(state, "y", 3, 6.0, start=3)
    state.match(6.0)
    assert state.clearing().slots["z"] == 3, "it waits again since then"


def test_a_run_that_comes_back_after_its_pool_was_lost_keeps_what_nobody_took():
    state = PoolState(0.0)
    state.set_nodes({"a": (3, {})}, 0.0)
    held = [PoolSlot(f"s{k}", "a", k, holder="x", request=f"x/{k}") for k in range(2)]
    before = replace(pool_view(), slot_s=100.0, lent_slot_s=40.0, borrowed_slot_s=15.0)
    assert state.join(RunInfo("x"), 0.0, held, before) == []
    assert state.runs["x"].slot_s == 100.0 and state.handovers == 0
    view = view_of(state, "x", 0.0)
    assert (view.lent_slot_s, view.borrowed_slot_s, state.credits.of("x")) == (40.0, 15.0, 25.0), "it gets back what it lent"
    state.release(["x/0"], 1.0)
    assert state.held("x") == 1
    state.join(RunInfo("y"), 1.0)
    ask(state, "y", 1, 1.0)
    [taken] = state.match(1.0)
    late = [PoolSlot(taken.id, "a", 0, holder="x", request="x/0")]
    assert state.join(RunInfo("x"), 2.0, late) == [taken.id]


@pytest.mark.slow
@settings(max_examples=4)
@given(st.integers(0, 2**16))
def test_a_day_of_arrivals_kills_and_stops(seed: int) -> None:
    """A hundred runs of random length on eight slots. Some are killed, some stopped, some hang; all have an end, and all is idle then."""
    rng = np.random.default_rng(seed)
    state, now, made, ended = pool(8), 0.0, 0, 0
    alive: dict[str, SimpleNamespace] = {}
    held_s = 0.0
    while ended < 100:
        now += 1.0
        held_s += sum(slot.holder != "" for slot in state.slots.values())
        state.account(now)
        if made < 100 and rng.random() < 0.1:
            made += 1
            info = RunInfo(f"run{made}", least=int(rng.integers(1, 4)), folder=str(made))
            assert not state.refusal(info, now)
            state.join(info, now)
            alive[info.run] = SimpleNamespace(work=float(rng.exponential(60.0)), ids=[], dead=False, asked=0, need=info.least)
        for name, run in list(alive.items()):
            if name not in state.runs:  # it was silent
                assert run.dead
                del alive[name]
                ended += 1
                continue
            if run.dead:
                continue
            state.runs[name].heard_s = now
            granted = [slot.request for slot in state.slots.values() if slot.holder == name]
            run.work -= len(granted) * (len(granted) >= run.need)
            if run.work <= 0:
                state.leave(name, now)
                del alive[name]
                ended += 1
            elif rng.random() < 0.006:
                run.dead = True  # killed, or it hangs
            elif now % 2 and (surplus := view_of(state, name, now).surplus):  # a run looks every two seconds
                state.release(granted[:surplus], now)
            elif len(granted) + sum(one.run == name for one in state.requests.values()) < max(run.need, 2):
                run.asked += 1
                state.ask(SlotRequest(f"{name}/{run.asked}", name), now)
        state.match(now)
        for info in state.silent(now):
            state.leave(info.run, now)
        assert now < 1e5, "a run starves"
    assert not state.runs and not state.requests and all(not slot.holder for slot in state.slots.values())
    assert len(state.past) == 100
    assert sum(past.slot_s for past in state.past) == pytest.approx(held_s)
    assert sum(past.slot_s for past in state.past) + state.free_slot_s == pytest.approx(8 * now)


def test_what_a_run_has_paid_counts_once_when_it_joins_again_after_a_silence():
    state, info = pool(1), RunInfo("x", folder="x", job="1")
    state.join(info, 0.0)
    ask(state, "x", 1, 0.0)
    [slot] = state.match(0.0)
    held, before = replace(slot), view_of(state, "x", 10.0)
    state.leave("x", 10.0)
    assert state.join(info, 12.0, [held], before) == [] and state.runs["x"].slot_s == 10.0 and not state.past
    state.leave("x", 15.0)
    assert [past.slot_s for past in state.past] == [13.0]
    state.join(later := replace(info, id="later"), 15.0)
    assert len(state.past) == 1, "another run in its folder"
    state.join(later, 20.0, before=view_of(state, "x", 19.0))
    assert [past.slot_s for past in state.past] == [13.0], "what the first one paid is not the other one's"


def test_what_runs_pay_today_counts_from_midnight():
    state = pool(2)
    state.begin_day(7, 0.0)
    for name in ("x", "y"):
        state.join(RunInfo(name), 0.0)
        ask(state, name, 1, 0.0)
    state.match(0.0)
    state.leave("y", 10.0)
    assert [view_of(state, "x", 30.0).today_slot_s, state.past[0].today_slot_s] == [30.0, 10.0]
    state.begin_day(7, 40.0)
    state.begin_day(8, 50.0)
    view = view_of(state, "x", 65.0)
    assert (view.slot_s, view.today_slot_s, view.day) == (65.0, 15.0, 8)
    assert (state.past[0].slot_s, state.past[0].today_slot_s) == (10.0, 0.0)
    for day, paid in ((8, 15.0), (9, 0.0)):  # a pool that is replaced learns it from the run
        other = pool(2)
        other.begin_day(day, 0.0)
        other.join(RunInfo("x"), 0.0, before=view)
        assert view_of(other, "x", 0.0).today_slot_s == paid
