"""Pools of nodes: which pool a node belongs to."""

from __future__ import annotations

import pytest

from placement.pools import OWN, PoolKind, has_labels, pool_of

POOLS = (PoolKind("spot", {"market": "spot"}), PoolKind("large", {"gpu": "A100"}), PoolKind(OWN))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"market": "spot", "zone": "a"}, "spot"),
        ({"gpu": "A100"}, "large"),
        ({"gpu": "A100", "market": "spot"}, "spot"),
        ({"market": "on-demand"}, OWN),
        ({}, OWN),
    ],
)
def test_node_belongs_to_first_pool_with_its_labels(labels: dict[str, str], name: str) -> None:
    assert pool_of(labels, POOLS).name == name


@pytest.mark.pure
@pytest.mark.parametrize(
    ("condition", "values"),
    [("spot", ["spot"]), ("!spot", ["other", None]), ("in(spot, other)", ["spot", "other"]), ("!in(spot,other)", [None])],
)
def test_conditions_are_those_of_ray(condition: str, values: list[str | None]) -> None:
    for value in ("spot", "other", None):
        labels = {} if value is None else {"market": value}
        assert has_labels(labels, {"market": condition}) is (value in values)
