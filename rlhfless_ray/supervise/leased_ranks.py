"""Slots of a supervised stage's ranks. Ray Train's own group of workers takes none.

The stage has its slots before Ray Train starts, whose group only says on which node each rank is. On GPUs `rank_trainer` shows each
rank its device.
"""

from __future__ import annotations

import time
from contextlib import suppress

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.market import bid_of
from placement.planning.objective import Objective
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.lease import Lease, LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.slot_source import SlotSource
from rlhfless_ray.recipe.learn_sections import even_ranks

GROW_S = 60.0  # time without a change after which a stage takes slots that are free; starting its ranks again takes about 10 s
WAIT_S = 1.0  # longest wait for the slots of ranks that are not needed
BID_S = 10.0  # interval of bids
FIRST_GUESS_S = 600.0  # time left, as the first bid says it, before a step was measured
END_S = 30.0  # longest wait for the end of a rank's process, which keeps its device's memory until then


class LeasedRanks:
    """Leases of the ranks that train now."""

    def __init__(
        self,
        source: SlotSource,
        ledger: Ledger,
        deadline_s: float,
        min_ranks: int,
        max_ranks: int,
        slots_per_rank: int,
        name: str,
        sharing: int = 1,
    ) -> None:
        """`sharing`: ranks that share a copy of the model (`learner.tensor_parallel`)."""
        self.source, self.min_ranks, self.max_ranks, self.slots_per_rank = source, min_ranks, max_ranks, slots_per_rank
        self.sharing = sharing
        self.leases = LeaseManager(source.resource, ledger, deadline_s, name, source)
        self.ranks: list[list[Lease]] = []  # the leases of each, in no order that Ray Train knows
        self.unassigned: list[list[Lease]] = []
        self.processes: list[tuple[str, int, float]] = []  # of the ranks that have started: node, id and begin
        self.wanted, self.left_s = max_ranks, FIRST_GUESS_S
        self.changed_s = self.bid_s = -float("inf")

    def take(self) -> list[str]:
        """Lease slots for at least `min_ranks` ranks, and return the node of each rank. Raises RunError after the lease deadline."""
        self._bid()
        width = self.slots_per_rank
        taken = self.leases.take(self.wanted, "learner", None, self.min_ranks, WAIT_S, width=width)
        self.ranks = [taken[begun : begun + width] for begun in range(0, len(taken), width)]
        even = max(self.min_ranks, even_ranks(len(self.ranks), self.sharing))
        self.leases.release([lease for leases in self.ranks[even:] for lease in leases])
        del self.ranks[even:]
        self.unassigned, self.changed_s, self.wanted = list(self.ranks), time.monotonic(), self.max_ranks
        return [leases[0].slot.node for leases in self.ranks]

    @property
    def devices(self) -> dict[str, tuple[str, ...]]:
        """Names of the devices that are leased on each node, by its id; empty on CPU."""
        slots = [leases[0].slot for leases in self.ranks] if self.leases.resource == "gpu" else []
        return {node: tuple(str(slot.device) for slot in slots if slot.node == node) for node in {slot.node for slot in slots}}

    def assign(self, rank: int, node: str, device: str, process: int, began_s: float) -> list[str]:
        """Return the ids of the leases on which a rank works that has started on a node.

        `device`: the one that it sees, on GPU. `process`, `began_s`: id and begin of its process.
        """
        on_cpu = self.leases.resource == "cpu"
        leases = next(one for one in self.unassigned if one[0].slot.node == node and (on_cpu or str(one[0].slot.device) == device))
        self.unassigned.remove(leases)
        self.processes.append((node, process, began_s))
        for lease in leases:
            self.leases.hand_over(lease, "learner", f"rank {rank}")
        return [lease.id for lease in leases]

    def release(self) -> None:
        """Return the slots, on GPU once the ranks' processes have left their devices."""
        if self.leases.resource == "gpu":
            for node, process, began_s in self.processes:
                on_its_node = NodeAffinitySchedulingStrategy(node, soft=False)
                with suppress(RayError):  # its node is lost
                    ray.get(wait_for_end.options(scheduling_strategy=on_its_node).remote(process, began_s), timeout=2 * END_S)
        self.processes = []
        self.leases.release(self.leases.without_lost([lease for leases in self.ranks for lease in leases]))
        self.ranks = []

    def change(self) -> str:
        """Return why the ranks should start again in another number, which `take` will then ask for, or an empty string."""
        now, ranks = time.monotonic(), len(self.ranks)
        least = max(self.min_ranks, min(self.sharing, ranks))  # parts of a copy shared by fewer may not fit
        view = self.source.view
        fewer = max(least, even_ranks(ranks - -(-view.surplus // self.slots_per_rank), self.sharing))
        if fewer < ranks:
            self.wanted = fewer
            return f"another run waits for its slots: training goes on with {fewer} of {ranks} ranks"
        wanted = min(self.max_ranks, view.target // self.slots_per_rank)
        if wanted <= ranks or now - self.changed_s <= GROW_S:
            return ""
        self.changed_s = now  # asks no sooner again, whether there is room or not
        more = even_ranks(min(wanted, ranks + self.source.room(self.slots_per_rank)), self.sharing)
        if more <= ranks:
            return ""
        self.wanted = more
        return f"there are free slots: training goes on with {more} ranks after {ranks}"

    def expect(self, left_s: float) -> None:
        """Say how long training goes on with the ranks that it has: what slots are worth follows from it."""
        self.left_s = left_s
        if time.monotonic() - self.bid_s > BID_S:
            self._bid()

    def metrics(self) -> JsonObject:
        return self.source.view.metrics() if isinstance(self.source, PoolClient) else {}

    def _bid(self) -> None:
        """Bid as if ranks divided the work evenly."""
        self.bid_s, now = time.monotonic(), len(self.ranks) or self.max_ranks
        numbers = [count for count in range(self.min_ranks, self.max_ranks + 1) if even_ranks(count, self.sharing) == count]
        slot_s = self.left_s * now * self.slots_per_rank
        points = [(count * self.slots_per_rank, self.left_s * now / count, slot_s) for count in numbers]
        self.source.bid(bid_of(self.source.info.run, points, Objective(prefer=0.5)))


@ray.remote(num_cpus=0, max_retries=0)
def wait_for_end(process: int, began_s: float) -> None:
    """Wait until a process of this node has ended, for END_S at most."""
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        found = psutil.Process(process)
        if found.create_time() == began_s:  # otherwise another process has its number
            found.wait(END_S)
