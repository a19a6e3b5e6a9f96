"""The changes that the benchmark makes to a cluster, without a cluster."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import changing_cluster
from benchmarks.changing_cluster import ANY, CHANGES, MOST, ClusterChanges, reached


class FakeNodes:
    """Counts nodes; those that were lost are gone at the next moment."""

    def __init__(self) -> None:
        self.count, self.there, self.lost, self.made = 0, list[str](), list[str](), 0
        self.count = MOST
        self.fill()

    def fill(self) -> None:
        self.there = [node for node in self.there if node not in self.lost]
        while len(self.there) < self.count:
            self.made += 1
            self.there.append(f"node{self.made}")

    def passing(self) -> list[str]:
        return list(self.there)

    def lose_later(self, node: str, seconds: float) -> None:
        assert node in self.there and seconds >= 0
        self.lost.append(node)


def test_each_step_has_one_change_of_a_kind_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    drained, prices = list[str](), Counter[str]()
    monkeypatch.setattr(changing_cluster, "drain", lambda node, seconds: drained.append(node))
    monkeypatch.setitem(CHANGES, "price changes", lambda run, rng, nodes: prices.update(["changed"]) is None)
    nodes = FakeNodes()
    changes, counts = ClusterChanges(200, nodes, seed=0), list[int]()  # type: ignore[arg-type]
    for step in range(1, 230):
        run: Any = SimpleNamespace(parts=SimpleNamespace(session=SimpleNamespace(step=SimpleNamespace(number=step))))
        for moment in ANY:
            for _ in range(8):
                changes(run, moment)
                counts.append(nodes.count)
    kinds = Counter(changes.kinds_done)
    assert not changes.kinds and kinds.total() == 200 and len({step for step, _, _ in changes.done}) == 200
    assert set(kinds) == set(CHANGES) and min(kinds.values()) >= 10, kinds
    assert min(counts) == 0 and max(counts) == MOST and set(drained) <= set(nodes.lost)
    assert len(nodes.lost) == len(set(nodes.lost)), "no node is lost twice"


def test_what_is_wrong_misses_a_target() -> None:
    fine = {"wrong": {"samples lost": 0}, "left": {"leases": 0}, "not_done": {}}
    assert all(target.met for target in reached({"replayed": fine}))
    for worse in ({"wrong": {"samples lost": 1}}, {"left": {"leases": 1}}, {"not_done": {"change": 1}}, {"failed": "it ended"}):
        assert not all(target.met for target in reached({"replayed": {**fine, **worse}}))
