"""How parked processes release memory, and what they keep."""

from __future__ import annotations

import ray
from ray.exceptions import RayTaskError

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.instance import GONE, Instance, State, reason_of
from rlhfless_ray.functions.ledger import Ledger


def give_back(instance: Instance) -> None:
    """Make a parked process release memory in the background. An engine releases its weights too."""
    instance.version, instance.giving_back = None, instance.actor.park.remote()


def record_kept(instance: Instance, ledger: Ledger) -> None:
    """Record the memory that a parked process has kept, if it has replied."""
    if instance.giving_back is None or not ray.wait([instance.giving_back], timeout=0)[0]:
        return
    try:
        instance.kept_mb = ray.get(instance.giving_back)["memory_mb"]
    except GONE:  # a dead process holds nothing; its next use reports the failure
        return
    except RayTaskError as error:
        raise RunError(f"{instance.id} could not release memory: {reason_of(error)}") from error
    ledger.kept(instance.id, *instance.parked_memory)


def begin_to_leave(instance: Instance) -> None:
    """Make a process leave its device. An engine loses its weights with the device's memory."""
    instance.leaving, instance.version = (instance.actor.park.remote(), instance.leases), None


def wait_until_left(instance: Instance, seconds: float, ledger: Ledger) -> None:
    """Wait until a process has left its device, if it has not yet, and record what it has kept. A dead one holds nothing."""
    if instance.leaving is None:
        return
    ref, leases = instance.leaving
    try:
        reply = get(ref, seconds, f"{instance.id} to leave its device")
    except GONE:  # its next use reports the failure
        instance.leaving = None
        return
    except RayTaskError as error:
        instance.leaving = None
        raise RunError(f"{instance.failure() or f'{instance.id} could not leave its device: {reason_of(error)}'}") from error
    instance.leaving, instance.kept_mb = None, reply["memory_mb"]
    if instance.state == State.PARKED:
        ledger.kept(instance.id, *instance.parked_memory)
    ledger.spans([lease.id for lease in leases if lease.holder == instance.id], reply["spans"])
