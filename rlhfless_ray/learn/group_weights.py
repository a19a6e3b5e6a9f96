"""The weight versions that a worker group publishes, and their copies on the driver's node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import GONE, Instance, is_loss, reason_of
from rlhfless_ray.functions.replicate import copy_to_driver_node
from rlhfless_ray.learn.ranks import Ranks
from rlhfless_ray.types import WeightVersion
from rlhfless_ray.weights.checksum import combined, listed
from rlhfless_ray.weights.remote_folder import StoredFiles


class GroupWeights:
    def __init__(self, group: Ranks, shares_base: bool) -> None:
        """`shares_base`: published versions are adapters that refer to the files of their base."""
        self.group, self.shares_base = group, shares_base
        self.base: Any = None  # if shared, a reference to the model's files, or to the arguments of `map_files`
        self.requested: list[list[Any]] = []  # (weights, digests) of each rank, requested together with the last update
        self.holds_all = False  # each rank holds the whole model
        self.reads_published = False  # the ranks read weights from shared memory between updates, see `RankWeights.read_published`
        self.reading: list[Any] = []  # references of the pending `read_published` calls

    def opened(self, reply: Mapping[str, Any]) -> None:
        """Take what a rank has said of its model."""
        self.reads_published, self.holds_all = reply.get("reads_published", False), reply.get("holds_all", False)

    def share_base(self, model: StoredFiles, sources: Any) -> None:
        """Put the base of adapters where engines find it. `sources`: those from which the ranks read the model."""
        if not self.shares_base or self.base is not None:
            return
        if isinstance(sources, list):
            self.base = sources[0].files  # one copy on a node with ranks and engines
        else:  # on one machine engines map the files too: reading them here would make the driver hold the whole model
            self.base = ray.put(sources if self.group.loopback else model.files)

    def request(self, publishes: bool) -> None:
        """Let the ranks prepare their weights after the update that was asked for, if they will be published."""
        self.requested = self._ask() if publishes else []

    def wait_until_read(self) -> None:
        """Wait until the ranks have read the weights that they published last."""
        if self.reading:
            self.group.wait_for(self.reading, f"the {self.group.name} to read its published weights")
            self.reading = []

    def forget_calls(self) -> None:
        """Forget the calls of ranks that were ended."""
        self.requested, self.reading = [], []

    def publish(self, version: int) -> WeightVersion:
        """Publish the current weights as a version that engines can pull.

        Each rank's shard stays in the object store of its node. Where each rank holds the whole model, the ranks of every node publish all
        of it, so that no node pulls what one of its ranks holds. If no rank is on the driver's node, copies of the shards are made there in
        the background, or else of those on other nodes.
        """
        shards: list[Any] = []

        def ask() -> list[Any]:
            refs, self.requested = self.requested or self._ask(), []
            shards[:] = [shard for shard, _ in refs]
            return [digests for _, digests in refs]

        replies = self.group.call(ask, "the learner to publish weights")
        self.group.record_spans(spans for _, spans in replies)
        told: list[dict[str, int]] = [digests for digests, _ in replies]
        digest_of = {name: digest for of_rank in told for name, digest in of_rank.items()}
        differing = {name for of_rank in told for name, digest in of_rank.items() if digest_of[name] != digest}
        if differing:
            # DDP's drift: at ZeRO 1 and 2 each weight is computed by one rank, which sends it to the others
            why = " At learner.zero_stage 0 each computes all of them, and unlike devices round differently."
            why = "" if self.group.layout.zero_stage else why
            cure = "continue with --resume" if self.group.layout.zero_stage else "set learner.zero_stage=1 and continue with --resume"
            raise RunError(f"ranks of the learner hold different weights: {listed(sorted(differing))}.{why} To go on, {cure}")
        total, digests = combined(digest_of), ray.put(digest_of)
        held = [(shards[rank], self.group.by_rank[rank].slot.node) for rank, of_rank in enumerate(told) if of_rank]
        by_node = {node: tuple(shard for shard, where in held if where == node) for _, node in held}
        if self.reads_published:
            self.reading = [i.actor.read_published.remote(*by_node.get(i.slot.node, ())) for i in self.group.by_rank]
        others: dict[str, tuple[Any, ...]] = {}
        if self.holds_all:
            here = ray.get_runtime_context().get_node_id()
            first = here if here in by_node else held[0][1]
            others = {node: of_node for node, of_node in by_node.items() if node != first}
            held = [(shard, first) for shard in by_node[first]]
        copied = [copy_to_driver_node(shard, node) for shard, node in held]
        nodes = tuple(node if there else "" for (_, node), (_, there) in zip(held, copied, strict=True))
        copies = tuple(copy for copy, _ in copied) if any(nodes) else ()
        return WeightVersion(version, tuple(shard for shard, _ in held), total, nodes, copies, digests, self.base, others)

    def _ask(self) -> list[list[Any]]:
        return [i.actor.weights.options(num_returns=2).remote(*self._share(i)) for i in self.group.by_rank]

    def _share(self, instance: Instance) -> tuple[int, ...]:
        """Return the rank's share of a published version, see `RankWeights.published`."""
        if not self.holds_all:
            return ()
        on_node = [other for other in self.group.by_rank if other.slot.node == instance.slot.node]
        return on_node.index(instance), len(on_node)

    def wait_for_copy(self, weights: WeightVersion) -> WeightVersion:
        """Return the version once its copy is on the driver's node, so that engines can load it even if its node is lost.

        If the node is lost already, the copy takes the place of the original. If it was lost before the copy was complete, the
        weights are published again, which may need leases. Raises RunError if they differ from the first ones.
        """
        while weights.copies:
            try:
                get(list(weights.copies), self.group.deadline_s, "the driver's copy of the weights")
            except (ray.exceptions.RayTaskError, *GONE) as error:
                if not is_loss(error):  # the next copy would fail too
                    raise RunError(
                        f"weight version {weights.version} could not be copied to the driver's node: {reason_of(error)}"
                    ) from error
                if not self._lost(weights):
                    self.group.pool.faults.count("the process that copies weights", FailureCause.DIED, reason_of(error))
                self.group.recovery.say(
                    f"weight version {weights.version} was lost before it was copied: the {self.group.name} publishes it again"
                )
                again = self.publish(weights.version)
                if again.checksum != weights.checksum:
                    raise RunError(f"the {self.group.name} published other weights as version {weights.version} the second time") from None
                weights = again
            else:
                if not self._lost(weights):
                    return weights
                self.group.recovery.say(f"weight version {weights.version} was lost with its node: engines load the copy")
                weights = replace(weights, shards=weights.copies, nodes=(), copies=(), others={})
        return weights

    def _lost(self, weights: WeightVersion) -> bool:
        """Return whether a node that holds shards of this version is lost."""
        return any(self.group.pool.leases.nodes.confirm_lost(node) for node in dict.fromkeys(weights.nodes) if node)
