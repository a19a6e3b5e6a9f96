"""Leases on real placement groups: granted, handed over, released, refused with a reason."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError, NodeDiedError
from ray.util.placement_group import placement_group_table

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions import lease, node_groups
from rlhfless_ray.functions.cluster_nodes import cluster_slots, node_slots
from rlhfless_ray.functions.instance import device_environment
from rlhfless_ray.functions.lease import Lease, LeaseManager, Slot, places
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.node_groups import device_named

pytestmark = pytest.mark.ray


def leases_of(resource: str, deadline_s: float = 60.0) -> LeaseManager:
    return LeaseManager(resource, Ledger(resource, 1.0), deadline_s, f"test{time.time_ns()}")


def groups_alive(leases: LeaseManager) -> int:
    return sum(
        info["state"] != "REMOVED" and info["name"].startswith(f"rlhfless-{leases.run_id}") for info in placement_group_table().values()
    )


def test_a_lease_is_a_placement_group_and_its_release_removes_it(ray_cluster):
    leases = leases_of("cpu")
    taken = leases.take(3, "rollout")
    assert len(leases.held) == 3 == groups_alive(leases)
    assert len({lease.slot for lease in taken}) == 3
    leases.release(taken)
    assert not leases.held
    assert groups_alive(leases) == 0


def test_gpu_leases_have_distinct_devices(ray_cluster):
    leases = leases_of("gpu")
    taken = leases.take(4, "rollout")
    assert sorted(lease.slot.device for lease in taken) == [0, 1, 2, 3]
    leases.release_all()


def test_what_is_missing_is_said_after_the_deadline_and_nothing_is_kept(ray_cluster):
    for deadline_s in (2, 4, 8, 16, 32):  # until there was time enough to grant those that there are
        leases = leases_of("gpu", deadline_s)
        with pytest.raises(RunError, match=r"rollout needs 5 × \{'GPU': 1\} and got \d within \d+ s; the cluster has 4 GPU") as caught:
            leases.take(5, "rollout")
        assert groups_alive(leases) == 0 and not leases.held and not leases.pending
        if f"got 4 within {deadline_s} s; the cluster has 4 GPU, 0 free; this run holds 4" in str(caught.value):
            return
    raise AssertionError(str(caught.value))


def test_who_of_the_run_holds_its_slots_is_said(ray_cluster):
    leases = leases_of("gpu")
    [taken] = leases.take(1, "rollout")
    leases.hand_over(taken, "rollout", "rollout-7")
    leases.deadline_s = 0.1
    with pytest.raises(RunError, match=r"the cluster has 4 GPU, \d free; this run holds \d, last with rollout-7"):
        leases.take(4, "learn")
    leases.release_all()


def test_fewer_than_asked_for_are_taken_where_that_is_enough(ray_cluster):
    leases = leases_of("gpu")
    taken: list[Lease] = []
    for wait_s in (1, 2, 4, 8, 16, 32):  # until there was time enough to grant those that there are
        leases.release(taken)
        taken = leases.take(6, "rollout", need=1, wait_s=wait_s)
        assert groups_alive(leases) == len(taken) >= 1 and not leases.pending  # those that were not granted are withdrawn
        if len(taken) == 4:
            break
    assert len(taken) == 4
    leases.release_all()


def test_a_node_that_is_lost_as_it_grants_a_device_has_granted_none(ray_cluster, monkeypatch):
    leases, name, lost = leases_of("gpu"), node_groups.name_devices, [NodeDiedError("gone"), GetTimeoutError("no answer")]

    def ask(group, count):
        if not lost:
            return name(group, count)
        failed = Future()
        failed.set_exception(lost.pop())
        return failed

    monkeypatch.setattr(node_groups, "name_devices", ask)
    assert len(leases.take(4, "rollout", need=0, wait_s=20.0)) == 4 == groups_alive(leases) and not lost and not leases.pending
    leases.release_all()


def test_handing_over_does_not_touch_the_group_and_changes_the_holder_in_the_ledger(ray_cluster):
    leases = leases_of("cpu")
    [lease] = leases.take(1, "rollout")
    group = leases.source.slots.held[lease.id].group
    leases.hand_over(lease, "rollout", "rollout-1")
    time.sleep(0.02)
    leases.hand_over(lease, "learn", "learn-1")
    time.sleep(0.02)
    assert leases.source.slots.held[lease.id].group == group and lease.holder == "learn-1"
    leases.release([lease])
    kinds = [row.kind for row in leases.ledger.rows]
    assert kinds[-1] == "learn" and "rollout" in kinds
    held = leases.ledger.rows[-1].to_s - leases.ledger.rows[0].from_s
    assert sum(row.seconds for row in leases.ledger.rows) == pytest.approx(held, abs=1e-4)  # no second is lost or counted twice


def test_somebody_elses_pending_group_is_seen(ray_cluster):
    ours, theirs = leases_of("gpu"), leases_of("gpu")
    ours.take(4, "rollout")
    assert not ours.others_wait()
    asked = theirs.ask(1)
    deadline = time.monotonic() + 60
    while not (found := ours.others_wait()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found
    theirs.withdraw(asked)
    ours.release_all()


def test_looking_for_others_takes_a_hundredth_of_the_time_at_most(monkeypatch):
    """On a cluster that has seen many groups, all of which Ray tells of, a look takes long."""
    now, looked = [0.0], []

    def table() -> dict:
        looked.append(now[0])
        now[0] += 0.5
        return {"theirs": {"state": "PENDING", "bundles": {0: {"CPU": 1}}, "name": ""}}

    monkeypatch.setattr(node_groups, "placement_group_table", table)
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: now[0]))
    leases, told = leases_of("cpu"), []
    while now[0] < 200:
        told.append(leases.others_wait())
        now[0] += 1.0
    assert 3 <= len(looked) == sum(told) <= 5 and told[0]


def test_a_node_that_is_full_or_gone_is_not_waited_for(ray_cluster, monkeypatch):
    [here] = node_slots("cpu")
    ours = leases_of("cpu")
    assert ours.with_room([here] * 6 + ["gone"]) == [here] * 4
    ours.take(3, "rollout", ours.ask_preferred(3, [here] * 3))
    assert ours.with_room(["gone", here, here]) == [here]
    asked, before = [], ours.ask
    monkeypatch.setattr(ours, "ask", lambda count, nodes=None, **more: asked.append(nodes) or before(count, nodes, **more))
    [lease] = ours.take(1, "rollout", ours.ask_preferred(1, ["gone"]))
    assert asked == [None] and lease.slot.node == here
    assert ours.with_room([here]) == [] and groups_alive(ours) == 4
    ours.release_all()


def test_places_are_taken_at_home_first_and_nowhere_more_than_there_are():
    slots = {"a": 1, "b": 3, "c": 2}
    assert places(slots, "b", 2) == [Slot("b", 0), Slot("b", 1)]
    assert places(slots, "b", 5) == [Slot("b", 0), Slot("b", 1), Slot("b", 2), Slot("a", 0), Slot("c", 0)]
    assert len(places(slots, "c", 100)) == 6


def test_slots_are_counted_over_nodes(ray_cluster):
    assert cluster_slots("gpu") == 4 and cluster_slots("cpu") == 4
    assert ray.is_initialized()


@pytest.mark.parametrize(
    ("told", "device"), [("3", 3), (3, 3), ("GPU-8f3c0a1e-7f3b", "GPU-8f3c0a1e-7f3b"), ("MIG-52d4-1", "MIG-52d4-1"), (" 1 ", 1)]
)
def test_a_device_is_an_index_or_what_its_node_calls_it(told, device):
    """A node that was started with CUDA_VISIBLE_DEVICES of UUIDs, as MIG needs them, has leases too."""
    assert device_named(told) == device
    assert device_environment(Slot("node", device_named(told)), "gpu")["CUDA_VISIBLE_DEVICES"] == str(told).strip()


def test_a_process_without_a_gpu_of_rays_sees_its_device_whatever_ray_was_told():
    """Into 2.55 Ray hid all of them from such a process, and a cluster may still ask for that."""
    assert device_environment(Slot("node", 2), "gpu") == {"CUDA_VISIBLE_DEVICES": "2", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    assert device_environment(Slot("node", 2), "cpu") == {}
