"""Runs in which processes die and nodes go: the same samples and the same learning as in a run without, on replayed engines and
learners under the real driver, with real leases on several nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import ray

from benchmarks.common.call_hooks import call_after, call_before
from benchmarks.common.fault_injection import kill, pid_of
from benchmarks.common.replay import ReplayedLearner
from benchmarks.common.replay_setup import ReplaySetup, build, recipe_for, synthetic_lengths
from benchmarks.common.replayed_runtime import ReplayedRuntime
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.worker_pools import ActorClasses
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Span
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.tensor_slice import Slices, whole_slices
from tests.conftest import samples, two_nodes
from tests.run_files import rows

pytestmark = pytest.mark.ray

PROMPTS, SAMPLES, STEPS, TOKENS = 4, 4, 7, 48


@pytest.fixture(scope="module")
def nodes(no_ray: None) -> Iterator[Any]:
    """A head, where the driver is, and two more nodes, with two cores each."""
    with two_nodes(2, 2, 128) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> ReplaySetup:
    return built(tmp_path_factory.mktemp("world"), base_s=0.02)


def built(folder: Path, base_s: float, per_seq_s: float = 1e-4) -> ReplaySetup:
    lengths = synthetic_lengths(4 * PROMPTS, SAMPLES, TOKENS, seed=0)
    return build(folder, lengths, base_s=base_s, per_seq_s=per_seq_s, start_s=0.1, learn_s=0.2, clock=1.0)


def recipe_of(world: ReplaySetup, folder: Path, actors: int = 3, steps: int = STEPS, **sections: Any) -> Recipe:
    functions = {"slot": "cpu", "lease_deadline_s": 120, **sections.pop("functions", {})}
    watch = {"samples_per_step": 0}
    return recipe_for(
        world,
        folder,
        steps=steps,
        prompts=PROMPTS,
        samples=SAMPLES,
        actors=actors,
        max_tokens=TOKENS,
        functions=functions,
        watch=watch,
        **sections,
    )


Script = dict[tuple[int, str], Callable[["Hit"], None]]  # what happens in which step at which moment


class Heavy(ReplayedLearner):
    """Its weights are too large to travel with the word that they are there: they lie on its node."""

    def weights(self) -> tuple[Slices, tuple[dict[str, int], list[Span]]]:
        slices, (digest_of, spans) = super().weights()
        more = whole_slices({"more": np.zeros(2**20, np.uint8)}) if slices else {}
        return {**slices, **more}, ({**digest_of, **digests(more)}, spans)


class Hit(ReplayedRuntime):
    """Does something at moments of steps, and writes down the checksum of every version that was published."""

    def __init__(self, recipe: Recipe, script: Script | None = None) -> None:
        super().__init__(recipe)
        self.script = script or {}
        self.published: dict[int, int] = {}

    def actor_classes(self) -> ActorClasses:
        return replace(super().actor_classes(), learner=Heavy)

    def now(self, moment: str) -> None:
        if do := self.script.pop((self.parts.session.step.number, moment), None):
            do(self)

    def __enter__(self) -> Self:
        run = super().__enter__()
        session, updates, stages = self.parts.session, self.parts.updates, self.parts.stages
        call_before(session, "generate", lambda: self.now("parked"))
        call_before(stages.score, "score", lambda: self.now("score"))
        call_after(session, "_prefill", lambda: self.now("leases"))
        call_before(updates, "start", lambda: self.now("before update"))
        call_after(self.parts.records, "observe", lambda: self.now("update"))
        call_before(stages.learn, "publish", lambda: self.now("publish"))
        call_after(updates, "publish", self._published)
        return run

    def _published(self) -> None:
        weights = self.parts.session.weights
        assert weights is not None and weights.version not in self.published
        self.published[weights.version] = weights.checksum
        self.now("published")

    def rows(self) -> list[dict[str, Any]]:
        return rows(self.folder.path, 1)

    def total(self, name: str) -> float:
        return sum(row[name] for row in self.rows())


def go(run: Hit) -> Hit:
    with run:
        for _ in run:
            pass
    return run


@pytest.fixture(scope="module")
def clean(nodes: Any, world: ReplaySetup, tmp_path_factory: pytest.TempPathFactory) -> Hit:
    return go(Hit(recipe_of(world, tmp_path_factory.mktemp("clean"))))


def same(run: Hit, clean: Hit, steps: int = STEPS) -> None:
    """Every sample once, as without the fault; every version published once, with the content it would have had."""
    assert run.published == {version: clean.published[version] for version in range(1, steps + 1)}
    for step in range(1, steps + 1):
        mine, theirs = samples(run.folder.path, step), samples(clean.folder.path, step)
        assert [(s["prompt_index"], s["sample"]) for s in mine] == [(s["prompt_index"], s["sample"]) for s in theirs]
        assert [(s["response"], s["tokens"], s["reward"]) for s in mine] == [(s["response"], s["tokens"], s["reward"]) for s in theirs]
    assert len(run.rows()) == steps
    assert not run.leases.held and not run.leases.pending


def kill_learner(run: Hit) -> None:
    pid = pid_of(run.parts.stages.learn.worker_group.by_rank[0])
    assert pid is not None, "killed before, and not started anew since"
    os.kill(pid, signal.SIGKILL)


MOMENTS = {(2, "parked"): 0, (3, "before update"): 0, (4, "update"): 0, (5, "publish"): 1, (6, "published"): 1}


@pytest.mark.parametrize("every", [1, 0])
def test_a_learner_killed_at_any_moment_goes_on_where_it_was(
    nodes: Any, world: ReplaySetup, clean: Hit, tmp_path: Path, every: int
) -> None:
    """`every`: steps between two states in memory; 0: the checkpoints of every third step have to do."""
    recipe = recipe_of(world, tmp_path, checkpoint={"memory_every_steps": every, "every_steps": 3}, functions={"max_replacements": 5})
    run = go(Hit(recipe, dict.fromkeys(MOMENTS, kill_learner)))
    same(run, clean)
    assert run.total("faults/learner_restarts") == run.total("faults/bugs") == len(MOMENTS)
    # from disk: those of step 1 after the first checkpoint; of 1 and 2; none after 3; of 4 and 5; of 4 to 6 before that is saved
    redone = sum(MOMENTS.values()) if every else 1 + 2 + 0 + 2 + 3
    # on a busy machine step 4's update may end before the blow, and a state in memory may not be complete at the next one
    assert redone <= run.total("faults/updates_redone") <= redone + 2


def test_a_loop_that_is_left_is_a_stop_and_goes_on_later(nodes: Any, world: ReplaySetup, clean: Hit, tmp_path: Path) -> None:
    recipe = recipe_of(world, tmp_path, steps=4)
    with Hit(recipe) as left:
        for step in left:
            if step.number == 2:
                break
    status = json.loads((left.folder.path / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("stopped", "the loop was left after step 2 of 4")
    assert not (left.folder.path / "model").exists() and not left.leases.held
    later = Hit(recipe)
    later.resume = True
    go(later).published |= left.published
    same(later, clean, steps=4)


def test_faults_that_outrun_progress_end_the_run_and_say_so(nodes: Any, world: ReplaySetup, tmp_path: Path) -> None:
    recipe = recipe_of(world, tmp_path, functions={"max_replacements": 1})
    run = Hit(recipe, dict.fromkeys([(2, "update"), (3, "update")], kill_learner))
    with pytest.raises(
        RunError, match=r"a learner process died, and functions.max_replacements = 1 is used up: .*; each step without a failure"
    ):
        go(run)
    assert not run.leases.held and [row["step"] for row in run.rows()] == [1, 2]


def test_what_hangs_is_ended_and_its_step_has_exactly_its_samples(
    nodes: Any, world: ReplaySetup, clean: Hit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine at work, and a reward process that has the whole step to score, stop where no signal reaches."""
    monkeypatch.setattr("rlhfless_ray.reward.scoring.SLACK_S", 2.0)
    monkeypatch.setattr("rlhfless_ray.functions.instance.KNOWN_S", 1.0)
    rng, stopped = np.random.default_rng(0), []
    started: Callable[[Hit], bool] = lambda run: any(i.started for i in run.parts.stages.rollout.pool.working)  # noqa: E731
    engine = when(started, lambda run: stopped.append(kill(run.parts.stages.rollout.pool.working, rng, signal.SIGSTOP)))
    script: Script = {
        (1, "parked"): engine, (2, "score"): lambda run: stopped.append(kill(run.parts.stages.score.pool.working, rng, signal.SIGSTOP)),
    }  # fmt: skip
    recipe = recipe_of(world, tmp_path, steps=3, functions={"max_replacements": 50}, rollout={"silence_s": 3.0}, reward={"timeout_s": 1.0})
    run = go(Hit(recipe, script))
    same(run, clean, steps=3)
    assert stopped == [True, True] and run.total("faults/hung") >= 2  # a machine that is busy enough may add to them
    assert all(s["error"] is None for step in (1, 2, 3) for s in samples(run.folder.path, step))


# ---- nodes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def passing(nodes: Any) -> Iterator[Any]:
    """A node more, which may be taken away: it alone has the label."""
    node = nodes.add_node(num_cpus=3, object_store_memory=128 * 2**20, labels={"market": "spot"})
    nodes.wait_for_nodes(timeout=120)
    yield node
    if node in nodes.worker_nodes:
        nodes.remove_node(node)


@pytest.fixture
def taken(nodes: Any, passing: Any) -> Iterator[list[Any]]:
    """Placement groups that hold every core of the other nodes, until they are removed or the test is over."""
    elsewhere = [node.node_id for node in (nodes.head_node, *nodes.worker_nodes) if node is not passing]
    groups = [ray.util.placement_group([{"CPU": 1}], bundle_label_selector=[{"ray.io/node-id": n}]) for n in elsewhere for _ in range(2)]
    ray.get([group.ready() for group in groups], timeout=120)
    yield groups
    for group in groups:
        ray.util.remove_placement_group(group)


def drain(node_id: str, seconds: float = 60.0) -> None:
    """What a cloud's notice of preemption comes to, or `ray drain-node`."""
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = ray._private.worker.global_worker.gcs_client
    deadline_ms = int(1000 * (time.time() + seconds))
    accepted, why = client.drain_node(node_id, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "notice", deadline_ms)
    assert accepted, why


def when(condition: Callable[[Hit], bool], do: Callable[[Hit], None]) -> Callable[[Hit], None]:
    """Does it in the rollout of this step, as soon as something was heard and the condition holds."""

    def arm(run: Hit) -> None:
        tell, done = run.parts.stages.rollout._on_progress, []

        def told(*progress: int) -> None:
            tell(*progress)
            if not done and condition(run):
                done.append(True)
                do(run)

        run.parts.stages.rollout._on_progress = told  # type: ignore[method-assign]

    return arm


def engine_on(node_id: str) -> Callable[[Hit], bool]:
    return lambda run: any(i.slot.node == node_id for i in run.parts.stages.rollout.pool.working)


def on(run: Hit, node_id: str) -> list[Any]:
    """Instances of the run on a node."""
    pools = (run.parts.stages.rollout.pool, run.parts.stages.score.pool, run.parts.stages.learn.worker_group.pool)
    return [i for pool in pools for i in (*pool.working, *pool.parked) if i.slot.node == node_id]


@pytest.mark.parametrize("notice_s", [60.0, 2.5])
def test_a_drained_node_is_left_before_it_goes(nodes: Any, clean: Hit, tmp_path: Path, passing: Any, notice_s: float) -> None:
    """With time enough its engines end what they have, else that goes on elsewhere: nothing is generated again. Its learner moves between
    two steps."""
    recipe = recipe_of(
        built(tmp_path / "slow", base_s=0.12),
        tmp_path,
        steps=4,  # Ray's word of the notice must come while engines work
        actors=5,
        objective={"prefer": 1.0},
        functions={"max_replacements": 0},
        rollout={"stream_interval_s": 0.1},
    )
    here: list[bool] = []
    script = {
        (3, "parked"): when(engine_on(passing.node_id), lambda run: drain(passing.node_id, notice_s)),
        (3, "update"): lambda run: here.append(any(i.leases for i in on(run, passing.node_id))),
    }
    run = go(Hit(recipe, script))
    same(run, clean, steps=4)
    assert here == [False] and not on(run, passing.node_id)
    row = run.rows()[2]
    assert run.total("faults/bugs") == 0 and row["faults/preempted"] >= 1
    assert row["rollout/orphans"] == 0
    if notice_s < 60:
        assert row["rollout/moved"] >= 1 and "the node is removed in" in row["rollout/move_reason"]


def test_a_lost_node_takes_engines_and_parked_processes_with_it(
    nodes: Any, world: ReplaySetup, clean: Hit, tmp_path: Path, passing: Any
) -> None:
    recipe = recipe_of(
        world,
        tmp_path,
        actors=5,
        steps=4,
        objective={"prefer": 1.0},
        functions={"max_replacements": 0},
        rollout={"stream_interval_s": 0.05},
    )
    lose = when(engine_on(passing.node_id), lambda run: nodes.remove_node(passing, allow_graceful=False))
    run = go(Hit(recipe, {(3, "parked"): lose}))
    same(run, clean, steps=4)
    assert run.total("faults/bugs") == 0 and run.total("faults/preempted") >= 1 and not on(run, passing.node_id)


@pytest.mark.parametrize(
    "moment",
    [
        *("published", "published, no copy, two ranks", "loading"),
        pytest.param("begun, one slot left", marks=pytest.mark.long),
        "begun, one slot left of a shared pool",
    ],
)
def test_weights_whose_node_is_lost_are_had_from_elsewhere(
    nodes: Any, world: ReplaySetup, clean: Hit, tmp_path: Path, passing: Any, taken: list[Any], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's node goes with the weights that it has just published: before their copy is complete, before engines load them,
    while they load them, and where engines hold all the slots."""
    import rlhfless_ray.learn.group_weights as gang

    if "no copy" in moment:
        monkeypatch.setattr(gang, "copy_to_driver_node", lambda ref, node: (ref, [ref] if node == passing.node_id else []))

    ranks = 2 if "two ranks" in moment else 1

    def lose(run: Hit) -> None:
        assert run.parts.stages.learn.worker_group.by_rank[0].slot.node == passing.node_id
        nodes.remove_node(passing, allow_graceful=False)

    recipe = recipe_of(
        world,
        tmp_path,
        actors=5 if ranks == 2 else 3,
        steps=3,
        objective={"prefer": 1.0},
        functions={"max_replacements": 0},
        learner={"ranks": ranks},
        cluster={"pool": "shared pool" in moment},
    )
    run = Hit(recipe)
    if not moment.startswith("begun"):
        run.script[(1, "published") if moment.startswith("published") else (2, "leases")] = lose
    with run:
        assert run.parts.session.weights is not None and run.parts.session.weights.nodes == (passing.node_id,)
        held = 3 if "one slot" in moment else 2 if ranks == 2 else 0
        for group in taken[held:]:
            ray.util.remove_placement_group(group)
        begin = run.parts.stages.rollout.begin

        def begun(step: Step, weights: Any) -> None:
            if step.number != 2 or not moment.startswith("loading"):  # else engines are told when the weights are lost already
                begin(step, weights)
            if step.number == 2 and moment.startswith("begun"):
                assert run.parts.stages.rollout.pool.working
                lose(run)

        run.parts.stages.rollout.begin = begun  # type: ignore[method-assign]
        for _ in run:
            pass
    same(run, clean, steps=3)
    assert run.total("faults/bugs") == 0 and run.total("faults/preempted") >= 1 and run.total("faults/learner_restarts") == 1
