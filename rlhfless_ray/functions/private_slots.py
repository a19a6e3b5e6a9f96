"""The slots of a run that shares no pool: a pool of its own, in its own process, without an actor or a thread."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from rlhfless_ray.functions.node_groups import free_slots, others_wait
from rlhfless_ray.functions.pool_core import PoolCore
from rlhfless_ray.functions.pool_messages import RunInfo
from rlhfless_ray.functions.pool_view import reply_to
from rlhfless_ray.functions.slot_source import SlotSource


class PrivateSlots(SlotSource):
    """It gives slots back to Ray at once, because other programs of the cluster may wait for them."""

    def __init__(self, resource: str, run: str, *, is_alone: bool = False) -> None:
        """`is_alone`: the cluster serves this run alone, so that devices of a node may go back to Ray together."""
        super().__init__(resource, RunInfo(run))
        self.is_alone = is_alone
        self.pool = PoolCore(resource, f"rlhfless-{run}-", is_shared=False, is_bundled=is_alone and resource == "gpu")
        self.pool.state.join(self.info, time.monotonic(), session=self.slots.session)

    def _exchange(self, seconds: float | None = None) -> None:
        """Do the work of a pool's actor until none is left. Between two calls nothing does it."""
        state, groups = self.pool.state, self.pool.groups
        with self.lock:
            state.tell(self.slots.statement(), began_s := time.monotonic())
            while True:
                self.pool.settle()
                reply = reply_to(state, self.info.run, time.monotonic())
                is_naming = groups.is_naming and (seconds is not None or not state.requests)
                is_late = time.monotonic() - began_s >= (seconds or 0.0)
                if not groups.leaving and (reply.granted or (is_late and not is_naming)):
                    return self._accept(reply)
                time.sleep(groups.pause_s(time.monotonic()))

    def others_wait(self) -> bool:
        return others_wait(self.resource, self.pool.groups.prefix)

    def may_wait(self) -> bool:
        return False

    def room(self, width: int) -> int:  # other programs hold slots too
        return sum(count // width for count in free_slots(self.resource).values())

    def close(self) -> None:
        if self.slots.wants or self.slots.held:
            self.release([*self.slots.wants, *self.slots.held])


def name_of_run(folder: Path) -> str:
    """Return a name for the slots of a run that no other run of a cluster has. `folder`: of the run."""
    return hashlib.blake2b(f"{folder.resolve()} {time.time_ns()}".encode(), digest_size=4).hexdigest()
