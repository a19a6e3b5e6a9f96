"""Skipped optimizer steps in a row: those after the last one that was applied, over the borders of updates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.learn import rank_calls as module
from rlhfless_ray.learn.group_weights import GroupWeights
from rlhfless_ray.learn.rank_settings import RankLayout
from rlhfless_ray.learn.recovery import Recovery
from rlhfless_ray.learn.shares import Cutter
from rlhfless_ray.learn.update_stats import merged, without_steps
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.types import UpdateStats


def step(applied: str) -> UpdateStats:
    """One optimizer step: "x" is applied, "-" is skipped."""
    good = applied == "x"
    counts = {"trained_tokens": 5 * good, "skipped": int(not good), "applied": int(good), "skipped_last": int(not good)}
    return UpdateStats(**counts, grad_norm=1.0 if good else float("nan"), reason="" if good else "nan")


class Whole(Cutter):
    """Gives every rank what an update is asked with, which is no batch here."""

    def of_update(self, batch: Any) -> list[Any]:
        return [batch]


@pytest.fixture
def worker_group(monkeypatch: pytest.MonkeyPatch) -> WorkerGroup:
    monkeypatch.setattr(module, "ray", SimpleNamespace(put=lambda value: value))
    made = WorkerGroup.__new__(WorkerGroup)
    made.by_rank, made.threads, made.max_skipped, made.skipped_in_a_row = [SimpleNamespace(leases=[])], None, 3, 0
    made.by_rank[0].actor = SimpleNamespace(update=SimpleNamespace(remote=lambda batch, threads: batch))
    made.name, made.recovery, made.layout, made.weights = "learner", Recovery(1), RankLayout(), GroupWeights(made, False)
    made.cutter = Whole()
    made.wait_for = lambda refs, what, deadline_s=None: [(refs[0], [])]
    made.record_spans_of = lambda instance, spans: None
    return made


@pytest.mark.parametrize(
    ("updates", "counts"),
    [
        (["xx-x"] * 5, [0] * 5),
        (["xxx-"] * 5, [1] * 5),
        (["x--x", "x-"], [0, 1]),
        (["-", "-", "x", "-"], [1, 2, 0, 1]),
        (["x--", "-", "xx"], [2, 3, 0]),
    ],
)
def test_successes_in_between_begin_the_count_anew(worker_group: WorkerGroup, updates: list[str], counts: list[int]) -> None:
    found = []
    for update in updates:
        worker_group.start_update(merged([step(mark) for mark in update])).result()
        found.append(worker_group.skipped_in_a_row)
    assert found == counts


def test_too_many_in_a_row_end_the_run_with_advice_that_fits(worker_group: WorkerGroup) -> None:
    worker_group.start_update(merged([step("x"), step("-"), step("-")])).result()
    with pytest.raises(RunError, match=r"4 optimizer steps in a row .*: nan; nan; lower learner.learning_rate"):
        worker_group.start_update(merged([step("-"), step("-")])).result()
    worker_group.skipped_in_a_row = 0
    for _ in range(3):
        worker_group.start_update(without_steps(UpdateStats, 0)).result()
    with pytest.raises(RunError, match=r"no sample of the step has a reward; look at samples/$"):
        worker_group.start_update(without_steps(UpdateStats, 0)).result()
