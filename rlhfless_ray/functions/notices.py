"""Poll what the clouds say about the removal of nodes, beside what Ray knows of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import ray

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.cluster_nodes import draining_nodes
from rlhfless_ray.functions.instance import GONE, reason_of, start_actor
from rlhfless_ray.functions.lease import Slot
from rlhfless_ray.functions.notice_reader import NoticeReader

POLL_S = 1.0  # interval of polls: the shortest notice of a large cloud is 30 s
SOURCES = {
    "aws": "http://169.254.169.254/latest/meta-data/spot/instance-action",
    "gcp": "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
    "azure": "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
}
ADDRESS = "{address}"


class NoticePolls:
    """Notices of Ray and of a source that each node reads. Nothing waits for an answer. A poll that fails is a warning."""

    def __init__(self, source: str, nodes: Callable[[], Collection[JsonObject]], say: Callable[[str], None]) -> None:
        """Create the polls.

        `source`: a key of SOURCES, a URL or a file; with `{address}` this node asks for every other one. `nodes`: returns Ray's list.
        """
        self.source, self.nodes, self.say = SOURCES.get(source, source), nodes, say
        self.readers: JsonObject = {}  # actors, by the node on which they run
        self.asked: dict[Any, tuple[str, str]] = {}  # by the reference of an answer: the node that it is about, and that of its reader
        self.known: dict[str, float] = {}  # notices by node
        self.said: set[tuple[str, str]] = set()
        self.asked_s = -float("inf")

    def __call__(self) -> dict[str, float]:
        """Return {node id: time of its removal} as far as it is known, see `draining_nodes`."""
        self._receive()
        if time.monotonic() - self.asked_s >= POLL_S:
            self.asked_s = time.monotonic()
            self._ask()
        of_ray = draining_nodes()
        return {**self.known, **{node: deadline_s or self.known.get(node, deadline_s) for node, deadline_s in of_ray.items()}}

    def _ask(self) -> None:
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in self.nodes() if node["Alive"]}
        waiting = {node for node, _ in self.asked.values()}
        self.known = {node: deadline_s for node, deadline_s in self.known.items() if node in alive}
        self.readers = {node: reader for node, reader in self.readers.items() if node in alive}
        here = ray.get_runtime_context().get_node_id()
        for node, address in alive.items():
            if node in waiting:
                continue
            where = here if ADDRESS in self.source else node
            if where not in self.readers:
                self.readers[where] = start_actor(NoticeReader, Slot(where, 0), "cpu", {})
            self.asked[self.readers[where].read.remote(self.source.replace(ADDRESS, address))] = node, where

    def _receive(self) -> None:
        if not self.asked:
            return
        for ref in ray.wait(list(self.asked), num_returns=len(self.asked), timeout=0)[0]:
            node, where = self.asked.pop(ref)
            try:
                removed_s, failure = ray.get(ref)
            except GONE as error:
                removed_s, failure = None, reason_of(error)
                self.readers.pop(where, None)
            if failure:
                self._warn(node, failure)
            elif removed_s is None:
                self.known.pop(node, None)
            else:
                self.known[node] = removed_s

    def _warn(self, node: str, failure: str) -> None:
        """Tell once per node and failure. What was known of the node stays."""
        if (node, failure) not in self.said:
            self.said.add((node, failure))
            self.say(f"functions.notice: {self.source} cannot be read on node {node[:8]}: {failure}; the run goes on without its notices")
