"""A whole run with prefix KV in every step, whose responses move with theirs, makes the samples that a run without makes."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.fault_injection import FaultInjector, kill, kill_index, prefill_instances
from placement.measurements.term import Term
from placement.scaling.prefix_benefit import PrefixSpeed
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.rollout.inflight_migrations import MigrationRequest
from rlhfless_ray.rollout.migration_policy import MigrationPolicy, MigrationRequests
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import EngineStep
from tests.conftest import samples, small_recipe
from tests.run_files import engines_in_step

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(900)]


class ToAndFro(MigrationPolicy):
    """At each look all that decodes goes to the other engine; by its pages, which are set to be quick: contexts are short."""

    def decide(self, token_log: TokenLog, engines: list[int], steps: list[EngineStep], leaving: object = ()) -> MigrationRequests:
        self.pages = Term(1e-6)
        moves: list[MigrationRequest] = []
        for source, target in zip(engines, reversed(engines), strict=True):
            decoding = np.flatnonzero(~token_log.finished & (token_log.owner == source) & (token_log.length > 0))
            moves += self.choose_methods(decoding, token_log, source, target, "to and fro") if source != target else []
        return MigrationRequests(tuple(moves), time_saved_s=1.0)


def longer(folder: Path, name: str, **overrides: Any) -> Recipe:
    """Responses so long that there is something to move. More steps than are compared, for a machine on which pages come too late in
    each of four."""
    return Recipe.parse(small_recipe(folder, run__name=name, run__steps=12, rollout__max_tokens=96, evaluate__prompts=2, **overrides))


def test_prefix_kv_and_killed_processes_change_no_sample(private_ray: None, tmp_path: Path) -> None:
    """As one without service and moves. Before step 2 the prefill instance is killed, and before step 4 the replica that owns the
    pages."""
    with Runtime(longer(tmp_path, "plain", rollout__prefix_kv="off", rollout__migrate="off")) as plain:
        for step in plain:
            if step.number == 4:
                break
    recipe = longer(
        tmp_path, "served", rollout__prefix_kv="on", rollout__min_actors=2, rollout__stream_interval_s=0.02, functions__elastic=False
    )
    moved: Counter[str] = Counter()
    nobody: Any = lambda run, moment: None  # noqa: E731
    with engines_in_step(), FaultInjector(recipe, nobody) as run:  # what is to move must not have ended before the driver looks
        stage = run.parts.stages.rollout
        assert stage.migration.is_on and stage.migration.pages is not None
        stage.migration = ToAndFro("auto", 0.7, carries=True)
        for step in run:
            found = step.metrics
            moved.update({name: found[f"rollout/{name}"] for name in ("moved", "moved_by_pages", "move_fallbacks")})
            assert found["prefix/on"] == 1 and found.get("prefix/damaged", 0) == found.get("prefix/foreign", 0) == 0
            assert found["faults/bugs"] == (step.number == 2) and found["prefix/computed_tokens"] <= found["prefix/distinct_tokens"]
            if step.number in (1, 3):
                assert found["prefix/loaded"] > 0 and found["prefix/lost"] == found["prefix/failed"] == 0
                assert found["prefix/computed_tokens"] == found["prefix/distinct_tokens"]
            if step.number == 1:
                assert kill(prefill_instances(run), np.random.default_rng(0))
            if step.number == 3:
                assert kill_index(run, None, None)
            if step.number >= 4 and moved["move_fallbacks"] < moved["moved_by_pages"]:
                break
        assert run.parts.stages.prefix is not None
        state, costs = run.parts.state.checkpoints.load()[2], run.parts.stages.prefix.speed.costs()
        run.parts.stages.prefix.speed, stage.migration = PrefixSpeed.first_guess(1.0, 10**9), MigrationPolicy("auto", 0.7, carries=True)
        run.parts.state.restore(state)  # as a resumed run does
        assert run.parts.stages.prefix.speed.costs() == costs and state["moves"].keys() == {"prefill", "pages"}
    assert moved["moved"] >= moved["moved_by_pages"] > 0 and moved["move_fallbacks"] < moved["moved_by_pages"], moved
    for number in range(1, 5):
        assert [s["response"] for s in samples(run.folder.path, number)] == [s["response"] for s in samples(plain.folder.path, number)]
    with (run.folder.path / "ledger.csv").open() as file:
        assert any(row["kind"] == "prefill" and row["activity"] == "work" and float(row["money"]) > 0 for row in csv.DictReader(file))
