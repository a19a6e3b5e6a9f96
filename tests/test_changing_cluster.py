"""Runs whose cluster gains and loses nodes: they plan with what is there, and go on in their own slots, on replayed engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks.common.replay_setup import ReplaySetup
from rlhfless_ray.functions.cluster_nodes import node_slots
from tests.conftest import samples, two_nodes
from tests.test_faults import PROMPTS, SAMPLES, Hit, Script, built, engine_on, go, recipe_of, when

pytestmark = pytest.mark.ray

SPOT = {"market": "spot"}


@pytest.fixture(scope="module")
def nodes(no_ray: None) -> Iterator[Any]:
    """A head, where the driver is, and a node without cores, with nodes for engines to come."""
    with two_nodes(2, 0, 128) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> ReplaySetup:
    """More engines are faster: the time of a token is that of the sequences beside it."""
    return built(tmp_path_factory.mktemp("world"), base_s=2e-3, per_seq_s=4e-3)


class Spot:
    """Nodes with the label, of two cores each."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.nodes = cluster, list[Any]()

    def join(self, *_: Any) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=2, object_store_memory=128 * 2**20, labels=SPOT))
        self.cluster.wait_for_nodes(timeout=120)
        time.sleep(1.1)  # a list of nodes is used for a second

    def leave(self, *_: Any, sudden: bool = False) -> None:
        node = self.nodes.pop()
        self.cluster.remove_node(node, allow_graceful=not sudden)
        end_s = time.monotonic() + 60
        while node.node_id in node_slots("cpu") and time.monotonic() < end_s:
            time.sleep(0.2)
        time.sleep(1.1)


@pytest.fixture
def spot(nodes: Any) -> Iterator[Spot]:
    spot = Spot(nodes)
    spot.join()
    yield spot
    while spot.nodes:
        spot.leave()


def go_from_home(run: Hit) -> Hit:
    """Make all steps of a run whose learner starts on the head node, because the other nodes are taken meanwhile."""
    groups = [ray.util.placement_group([{"CPU": 1}], bundle_label_selector=[SPOT]) for _ in range(2)]
    ray.get([group.ready() for group in groups], timeout=120)
    with run:
        for group in groups:
            ray.util.remove_placement_group(group)
        for _ in run:
            pass
    return run


@pytest.fixture(scope="module")
def undisturbed(nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Hit:
    """A run on the head alone, which nothing befalls, on much faster engines: tokens do not depend on speed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return go(Hit(recipe_of(built(folder, base_s=1e-4), folder, actors=2, steps=9)))


def complete(run: Hit, undisturbed: Hit) -> None:
    """Each step has each sample once, with the tokens of the undisturbed run, and nothing is held."""
    for step in range(1, run.recipe.run.steps + 1):
        mine, theirs = samples(run.folder.path, step), samples(undisturbed.folder.path, step)
        assert len({(s["prompt_index"], s["sample"]) for s in mine}) == PROMPTS * SAMPLES
        same = ("prompt_index", "sample", "response", "tokens", "reward")
        assert [[s[key] for key in same] for s in mine] == [[s[key] for key in same] for s in theirs]
    assert [row["step"] for row in run.rows()] == list(range(1, run.recipe.run.steps + 1))
    assert not run.leases.held and not run.leases.pending and run.total("faults/bugs") == 0


def test_a_run_grows_and_shrinks_with_its_cluster_and_goes_on_without_a_node_of_its_label(
    nodes: Any, world: ReplaySetup, tmp_path: Path, spot: Spot, undisturbed: Hit, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(
        world, tmp_path, actors=8, steps=9, objective={"prefer": 1.0}, functions={"max_replacements": 0}, rollout={"nodes": SPOT}
    )
    where: dict[int, set[str]] = {}

    def note(run: Hit) -> None:
        where[run.parts.session.step.number] = {engine.slot.node for engine in run.parts.stages.rollout.pool.working}

    def lose_last(run: Hit) -> None:
        note(run)
        last = spot.nodes[0].node_id
        when(engine_on(last), lambda _: spot.leave(sudden=True))(run)

    script: Script = {
        **{(step, "parked"): note for step in range(1, 10)},
        (2, "update"): spot.join,
        (4, "update"): spot.leave,
        (6, "parked"): lose_last,
        (7, "update"): spot.join,
    }
    run = go_from_home(Hit(recipe, script))
    said = capsys.readouterr().out
    complete(run, undisturbed)
    plans = {row["step"]: row["plan/actors"] for row in run.rows()}
    assert max(plans[1], plans[2]) <= 2 and max(plans[3], plans[4]) > 2 and max(plans[5], plans[6]) <= 2, plans
    reasons = {row["step"]: row["pool/reason"] for row in run.rows()}
    assert "2 slots joined: the pool may be 4" in reasons[3] and "step 3: 2 slots joined: the pool may be 4" in said
    assert "2 slots left: the pool may be 2" in reasons[5]
    assert "no node labelled {'market': 'spot'} is left: engines work in this run's own slots" in said
    home = nodes.head_node.node_id
    assert home not in where[6] and where[7] == {home} and home not in where[8] | where[9], where
    assert "only the run's own node is left: the pool may be 2" in reasons[7]
    assert "nodes with the labels of rollout.nodes are back: the pool may be 2" in reasons[8]


def test_a_rollout_beside_the_update_that_loses_all_nodes_of_its_label_begins_after_the_update(
    nodes: Any, world: ReplaySetup, tmp_path: Path, spot: Spot, undisturbed: Hit, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learner holds every slot of its node then, which nothing would give back while the rollout waits."""
    recipe = recipe_of(
        world,
        tmp_path,
        actors=2,
        steps=5,
        learner={"max_slots_per_rank": 2},
        functions={"elastic": False, "max_replacements": 0},
        rollout={"nodes": SPOT, "max_lag_steps": 1},
    )

    def lose(run: Hit) -> None:
        assert run.parts.session.update is not None
        when(engine_on(spot.nodes[0].node_id), lambda _: spot.leave(sudden=True))(run)

    began_s = time.monotonic()
    run = go_from_home(Hit(recipe, {(2, "parked"): lose}))
    said = capsys.readouterr().out
    complete(run, undisturbed)
    assert time.monotonic() - began_s < recipe.functions.lease_deadline_s
    assert "no slot is free beside the update, so its rollout begins after it" in said
    assert [row["lag/max"] for row in run.rows()][2:] == [0, 0, 0], "under the newest weights"
