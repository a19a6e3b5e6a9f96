"""A run on two pools of nodes: slots are leased by label and billed by pool, also when the pool's only node goes and comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.replay_setup import ReplaySetup
from placement.pools import OWN
from rlhfless_ray.functions.ledger import read_ledger
from tests.conftest import two_nodes
from tests.test_changing_cluster import SPOT, Spot, complete, go
from tests.test_faults import Hit, Script, built, engine_on, recipe_of, when

pytestmark = pytest.mark.ray
PRICES = {"spot": 1.0, OWN: 4.0}  # per slot-hour


@pytest.fixture(scope="module")
def nodes(no_ray: None) -> Iterator[Any]:
    with two_nodes(2, 0, 128) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> ReplaySetup:
    """More engines are faster: the time of a token is that of the sequences beside it. A node that goes finds its engine at work."""
    return built(tmp_path_factory.mktemp("world"), base_s=4e-2, per_seq_s=8e-3)


@pytest.fixture(scope="module")
def undisturbed(nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Hit:
    """A run on the head alone, on much faster engines: tokens do not depend on speed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return go(Hit(recipe_of(built(folder, base_s=1e-4), folder, actors=2, steps=6)))


@pytest.fixture
def spot(nodes: Any) -> Iterator[Spot]:
    spot = Spot(nodes)
    spot.join()
    yield spot
    while spot.nodes:
        spot.leave()


def test_run_leases_by_label_bills_by_pool_and_goes_on_without_the_pool(
    nodes: Any, world: ReplaySetup, tmp_path: Path, spot: Spot, undisturbed: Hit, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = [{"name": "spot", "labels": SPOT, "price_per_hour": PRICES["spot"], "preempt_per_hour": 0.5}]
    recipe = recipe_of(
        world,
        tmp_path,
        actors=4,
        steps=6,
        objective={"prefer": 1.0},
        functions={"max_replacements": 0},
        price={"cpu_slot_per_hour": PRICES[OWN], "parked_share": 0.0},
        rollout={"pools": pools},
    )
    learners: set[str] = set()

    def look(run: Hit) -> None:
        learners.update(rank.slot.node for rank in run.parts.stages.learn.worker_group.by_rank)

    def lose(run: Hit) -> None:
        node = spot.nodes[0].node_id
        when(engine_on(node), lambda _: spot.leave(sudden=True))(run)

    script: Script = {**{(step, "update"): look for step in (1, 2, 5)}, (3, "parked"): lose, (4, "update"): spot.join}
    with Hit(recipe, script) as run:
        for _ in run:
            pass
    said = capsys.readouterr().out
    complete(run, undisturbed)
    assert learners == {nodes.head_node.node_id}, "the learner keeps off the pool"
    plans = {row["step"]: {pool: row.get(f"plan/pools/{pool}", 0) for pool in PRICES} for row in run.rows()}
    assert all(plan["spot"] <= 2 and plan[OWN] <= 2 for plan in plans.values()) and plans[2]["spot"] > 0 < plans[6]["spot"], plans
    assert plans[4]["spot"] == 0 < plans[4][OWN], plans
    assert "no node of pool spot is there" in said and "pool spot has nodes again" in said
    rows = read_ledger(run.folder.path / "ledger.csv")
    worked = {(row.kind, row.pool) for row in rows if row.slots and row.activity == "work"}
    assert {("rollout", "spot"), ("rollout", OWN), ("learn", OWN)} <= worked and ("learn", "spot") not in worked
    for row in rows:
        assert row.pool in PRICES and row.money == pytest.approx(row.seconds * row.slots * PRICES[row.pool] / 3600, abs=1e-8), row
    assert any(row.activity == "preempted" and row.pool == "spot" for row in rows)
    told = Counter[str]()
    for row in run.rows():
        told.update({pool: row.get(f"cost/pools/{pool}/money", 0.0) for pool in PRICES})  # type: ignore[arg-type]
    steps = [row for row in rows if row.step]
    assert dict(told) == {pool: pytest.approx(sum(row.money for row in steps if row.pool == pool), rel=0.05) for pool in PRICES}, (
        "of all steps; the last rows are of the end of the run"
    )
    assert run.autoscaler.terms.pools.rates["spot"].preemptions == 1
