"""The slots that runs of a cluster share, on real Ray: hand-overs, runs that are killed or hang, and a pool that is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnavailableError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from placement.market import Bid
from placement.planning.objective import Objective
from rlhfless_ray.autoscaler.market_bids import MarketBids
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.functions import pool_client
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.node_groups import POOL_PREFIX, tasks_wait
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.pool_messages import RunInfo
from rlhfless_ray.functions.slot_pool import ended_pools, find_pools
from rlhfless_ray.learn.gang_scheduling import GangScheduler
from tests.autoscaler.test_market_bids import update_sizes
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.ray
RUN = """
import sys, time, ray
from placement.market import Bid
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.pool_messages import RunInfo
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
source = PoolClient("cpu", RunInfo("other", folder="there", job=ray.get_runtime_context().get_job_id()))
leases = LeaseManager("cpu", Ledger("cpu"), 60.0, "other", source)
leases.take(3, "rollout")
@ray.remote(num_cpus=0)
class Engine:
    def ready(self): return True
engine = Engine.remote()
ray.get(engine.ready.remote())
print("holds", flush=True)
while True:
    time.sleep(0.2)
    leases.others_wait()
    leases.release(leases.take(1, "rollout", need=0))
    source.bid(Bid("other", (1, 3), (0.0, 50.0)))
"""


@pytest.fixture
def runs(ray_cluster) -> Callable[..., LeaseManager]:
    """Makes runs on the pool: a run's lease manager of the name. All leave at the end, and the pool ends with them."""
    made = []

    def run(name: str, *, resource: str = "cpu", deadline_s: float = 60.0, **info) -> LeaseManager:
        job = ray.get_runtime_context().get_job_id()
        source = PoolClient(resource, RunInfo(name, folder=f"runs/{name}", job=job, **info))
        made.append(LeaseManager(resource, Ledger(resource, 1.0), deadline_s, name, source))
        return made[-1]

    yield run
    for leases in made:
        leases.release_all()
    assert find_pools() == [] and groups() == 0


def groups() -> int:
    return sum(info["name"].startswith(POOL_PREFIX) and info["state"] != "REMOVED" for info in placement_group_table().values())


def status(resource: str = "cpu") -> dict:
    return ray.get(ray.get_actor(f"slot-pool-{resource}", namespace="rlhfless").status.remote())


def eventually(what: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until it holds. An actor that Ray restarts is asked again."""
    end = time.monotonic() + seconds
    while True:
        with suppress(ActorUnavailableError):
            if what():
                return
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_slot_passes_from_run_to_run_without_ray(runs):
    one, other = runs("one"), runs("other")
    taken = one.take(4, "rollout")
    known, before, waits_s = groups(), status()["handovers"], []  # pools of earlier tests on this cluster count too
    for k in range(20):
        giver, taker = (one, other) if k % 2 == 0 else (other, one)
        asked = taker.ask(1)
        time.sleep(0.01)
        from_s = time.monotonic()
        giver.release([taken[0]])
        [lease] = taker.collect(asked, "rollout", 30.0, need=1)
        waits_s.append(time.monotonic() - from_s)
        assert lease.slot == taken[0].slot
        taken[0] = lease
    assert sorted(waits_s)[len(waits_s) // 2] < 0.05, waits_s
    assert groups() == known == 4 and status()["handovers"] - before == 20


def test_an_update_waits_for_its_slot_that_a_rollout_of_another_run_gives_back(runs):
    one, other = runs("one"), runs("other")
    own, lent = one.take(1, "learner"), other.take(3, "rollout")
    other.source.bid(Bid("other", (1, 2, 3, 4), (0.0, 30.0, 40.0, 45.0)), 0.5)
    delay, _ = MarketBids(one.source, Objective(prefer=0.8), 1).begin_update(update_sizes(), 4, 1000.0, 4.0)
    assert delay.slots == 2 and "waits for 1 slot" in delay.reason

    def give() -> None:
        eventually(lambda: other.source.view.surplus == 1)
        time.sleep(0.3)
        other.release(lent[:1])

    rank = SimpleNamespace(slot=own[0].slot)
    pool = SimpleNamespace(leases=one, kind="learner", fits=lambda instance, slot: slot.node == instance.slot.node)
    gang = GangScheduler(pool, SlotBroker(one), "learner")
    at_once, _ = gang.take([rank], own, delay.slots)
    assert at_once == [own]
    giver = threading.Thread(target=give)
    giver.start()
    gang.wait_s, from_s = 30.0, time.monotonic()
    [leases], left = gang.take([rank], own, delay.slots)
    giver.join()
    assert [lease.slot for lease in leases] == [own[0].slot, lent[0].slot] and not left
    assert 0.3 <= time.monotonic() - from_s < 20 and gang.wait_s == 0, "it begins when the slot is there"


def test_devices_pass_too_and_every_slot_has_one_holder(runs):
    one, other = runs("one", resource="gpu"), runs("other", resource="gpu")
    held = one.take(4, "rollout")
    assert sorted(lease.slot.device for lease in held) == [0, 1, 2, 3]
    asked = other.ask(2)
    one.release(held[1:3])
    got = other.collect(asked, "rollout", 30.0, need=2)
    assert {lease.slot for lease in got} == {lease.slot for lease in held[1:3]}


def test_what_runs_paid_adds_up_to_what_the_pool_counted(runs):
    """Also if the pool reads late what they say. Before, it billed this time to the run that had let the slots go."""
    one, other = runs("one"), runs("other")
    process = ray.get(one.source.handle.__ray_call__.remote(lambda self: os.getpid()))
    leases = one.take(3, "rollout")
    time.sleep(0.3)
    os.kill(process, signal.SIGSTOP)
    one.release(leases[:2])
    time.sleep(1.0)
    os.kill(process, signal.SIGCONT)
    other.take(3, "rollout", need=3)
    time.sleep(0.3)
    for known in (one, other):
        known.release(list(known.held.values()))
    eventually(lambda: status()["held"] == 0)
    found = status()
    for known, told in zip((one, other), found["runs"], strict=True):
        assert sum(row.seconds for row in known.ledger.rows) == pytest.approx(told["slot_s"], abs=0.05)


def test_two_runs_of_one_name_and_shares_above_one_are_refused_in_a_sentence(runs):
    runs("one", share=0.7)
    with pytest.raises(UserError, match=r"run.name: a run in a folder named one is on this cluster already; `rlhfless cluster` shows"):
        PoolClient("cpu", RunInfo("one", folder="elsewhere/one"))
    with pytest.raises(UserError, match=r"run.name: a run in a folder named one is on this cluster already"):  # of another machine
        PoolClient("cpu", RunInfo("one", folder="runs/one", job="another"))
    with pytest.raises(UserError, match=r"cluster.share: 0.4 and the shares of other runs \(one: 0.7\) add up to 1.1, more than the pool"):
        PoolClient("cpu", RunInfo("other", share=0.4))
    with pytest.raises(UserError, match="the run needs 5 slots at once, but the pool has 4"):
        PoolClient("cpu", RunInfo("other", least=5))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_that_is_killed_or_hangs_loses_its_slots_and_no_other_run_ends(runs, how):
    one = runs("one", deadline_s=1.0)
    one.take(1, "rollout")
    ray.get(one.source.handle.__ray_call__.remote(lambda self: setattr(self.state, "silent_s", 4.0)))
    address = ray.get_runtime_context().gcs_address
    other = subprocess.Popen([sys.executable, "-c", RUN, address], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment())
    try:
        assert other.stdout is not None and other.stdout.readline().strip() == "holds"
        [engine] = [
            actor for actor in ray._private.state.actors().values() if actor["ActorClassName"] == "Engine" and actor["State"] == "ALIVE"
        ]
        os.kill(other.pid, how)
        from_s = time.monotonic()
        assert len(one.take(3, "rollout")) == 3  # although its deadline is shorter than the time until the other one counts as gone
        assert time.monotonic() - from_s < 30
        assert [run["name"] for run in status()["runs"]] == ["one"]
        eventually(lambda: ray._private.state.actors(engine["ActorID"])["State"] == "DEAD")  # nothing works on slots of others
    finally:
        with suppress(ProcessLookupError):
            os.kill(other.pid, signal.SIGCONT)
        other.kill()
        other.wait()


def test_a_run_that_gives_nothing_back_makes_others_wait_but_does_not_end_them(runs):
    one, other = runs("one"), runs("other", deadline_s=0.5)
    held = one.take(4, "rollout")
    threading.Timer(3.0, lambda: one.release(held[:1])).start()
    from_s = time.monotonic()
    other.take(1, "learner")
    assert 2.0 < time.monotonic() - from_s < 20
    eventually(lambda: not one.source.others_wait())
    with pytest.raises(RunError, match="within"):  # what nobody gives back has a deadline
        one.release(held[1:])
        other.take(5, "rollout", need=5)


def test_slots_that_a_run_lets_go_for_a_moment_go_to_a_program_that_waits_in_rays_queue(runs):
    """A run gives some up at the end of a step if another program waits. Before, the pool kept them for its next step."""
    one = runs("one")
    one.take(4, "rollout")
    group = placement_group([{"CPU": 1}])
    try:
        end = time.monotonic() + 30
        while placement_group_table(group)["state"] != "CREATED":
            assert time.monotonic() < end
            one.release([next(iter(one.held.values()))])
            if not one.take(1, "rollout", need=0, wait_s=0.1):
                time.sleep(1.0)
    finally:
        remove_placement_group(group)
    assert one.held


def test_free_slots_stay_in_the_pool_and_a_task_that_waits_for_one_is_seen(runs):
    one = runs("one")
    held = one.take(4, "rollout")
    task = ray.remote(num_cpus=1)(lambda: "done").remote()
    eventually(lambda: tasks_wait("cpu"))
    ray.cancel(task)
    eventually(lambda: not tasks_wait("cpu"))
    one.release(held)
    time.sleep(3.0)  # an update
    assert groups() == 4


def test_a_pool_that_dies_is_replaced_and_learns_what_runs_hold(runs):
    one, other = runs("one"), runs("other")
    said: list[str] = []
    one.source.say = said.append
    mine, theirs = one.take(2, "rollout"), other.take(1, "rollout")
    eventually(lambda: one.source.view.held == 2)
    ray.kill(one.source.handle, no_restart=False)
    from_s = time.monotonic()
    [more] = one.take(1, "learner")  # both go on meanwhile
    assert time.monotonic() - from_s < 30
    eventually(lambda: {run["name"]: run["held"] for run in status()["runs"]} == {"one": 3, "other": 1})
    assert len({lease.slot for lease in [*mine, *theirs, more]}) == 4 == groups()
    assert said == ["the slot pool was replaced, or had not heard from this run; the run keeps the slots that it holds"]
    one.release(mine)
    assert len(other.take(2, "rollout")) == 2


def test_a_pool_that_hangs_is_replaced(runs, monkeypatch):
    one = runs("one")
    one.take(1, "rollout")
    monkeypatch.setattr(pool_client, "ANSWER_S", 2.0)
    process = ray.get(one.source.handle.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(process, signal.SIGSTOP)
    assert len(one.take(1, "rollout")) == 1
    eventually(lambda: [run["held"] for run in status()["runs"]] == [2])


def test_a_run_that_was_silent_too_long_learns_that_its_slots_are_gone(runs, monkeypatch):
    one, other = runs("one"), runs("other")
    one.source.closed.set()  # its heartbeat ends
    one.source.thread.join()
    one.source.closed.clear()
    held = one.take(4, "rollout")
    ray.get(one.source.handle.__ray_call__.remote(lambda self: self.state.leave("one", time.monotonic())))
    assert len(other.take(4, "rollout")) == 4
    with pytest.raises(RunError, match=r"did not answer for 20 s, and its slots went to other runs of the cluster; --resume continues it"):
        one.take(1, "rollout")
    one.held.clear()
    assert len(held) == 4


def test_a_bid_moves_slots_to_the_run_that_gains_more(runs):
    one, other = runs("one", share=0.25), runs("other", share=0.25)
    one.source.bid(Bid("one", (1, 2, 3), (0.0, 10.0, 20.0)))
    other.source.bid(Bid("other", (1, 2, 3), (0.0, 1.0, 1.5)))
    one.take(1, "rollout"), other.take(3, "rollout")
    asked = one.ask(2)
    eventually(lambda: other.source.view.surplus == 2)
    assert other.others_wait() and other.source.what_if(Bid("other", (1, 2, 3), (0.0, 90.0, 99.0))).slots["other"] == 2
    other.release(list(other.held.values())[:1])
    assert len(one.collect(asked[:1], "rollout", 30.0, need=1)) == 1
    one.withdraw(asked[1:])
    assert "goes from" in one.source.view.reason or "keeps" in one.source.view.reason


def test_what_ended_runs_paid_outlives_their_pool(runs):
    one = runs("one", price=3.6)
    one.take(2, "rollout")
    time.sleep(0.3)
    one.release_all()
    eventually(lambda: find_pools() == [])
    before = next(pool for pool in ended_pools() if pool["resource"] == "cpu")
    paid = before["past"][-1]
    assert paid["name"] == "one" and paid["slot_s"] == paid["today_slot_s"] >= 0.6
    assert paid["money"] == paid["money_today"] == pytest.approx(paid["slot_s"] / 1000)
    other = runs("other")
    now = status()
    assert [past["slot_s"] for past in now["past"]] == [past["slot_s"] for past in before["past"]]
    assert now["began_s"] == before["began_s"] and 0 < now["past"][-1]["ended_s_ago"] < 60
    ray.kill(other.source.handle, no_restart=False)
    other.take(1, "rollout")
    eventually(lambda: [run["name"] for run in status()["runs"]] == ["other"])
    assert status()["past"][-1]["name"] == "one"
