"""Real engines in processes of their own, and the driver that moves their requests, with their KV pages and without, and one that
hangs: what comes out is what a rollout without moves gives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asking import BLOCK, FILES, SETTINGS, assert_same, requests, weights_of

from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.inflight_migrations import MigrationRequest
from rlhfless_ray.rollout.migration_policy import MigrationPolicy, MigrationRequests
from rlhfless_ray.types import Request
from rlhfless_ray.weights.channel import stored_version
from tests.conftest import two_engines
from tests.rollout_drivers import driver_of

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(600)]

LONG = [r for r in requests(96, seed=70) if len(r.token_ids) > 2 * BLOCK]
ASKED = [Request(i, r.token_ids, r.seed, 160, 0.0 if i % 3 == 0 else 1.0) for i, r in enumerate(LONG[:20])]
STEP_S = 0.005  # a rollout of 160 steps takes at least 0.8 s, in which the driver looks every 0.05 s


def actor_class() -> type:
    from rlhfless_ray.engine.exact_actor import ExactEngineActor

    class Counting(ExactEngineActor):
        """Engine steps take at least STEP_S: on a busy machine the driver would otherwise not look before the rollout is over."""

        def open(self, threads: int) -> dict[str, Any]:
            opened = super().open(threads)
            step = self.engine._step

            def slow_step() -> Any:
                time.sleep(STEP_S)
                return step()

            self.engine._step = slow_step  # type: ignore[method-assign]
            return opened

        def counts(self) -> tuple[int, dict[str, int]]:
            return os.getpid(), dict(self.engine.pages.counts)

    return Counting


class ScriptedMoves(MigrationPolicy):
    """A migration policy that moves half of the requests in every decision, all by one method."""

    def __init__(self, how: str) -> None:
        super().__init__("auto", 0.7)
        self.how, self.looks = how, 0

    def decide(self, token_log: Any, engines: list[int], steps: list[Any], leaving: object = ()) -> MigrationRequests:
        self.looks += 1
        live = np.flatnonzero(~token_log.finished & (token_log.length > 0))
        chosen = live[(live + self.looks) % 2 == 0]
        return MigrationRequests(
            tuple(
                MigrationRequest(part, a, b, "test", self.how)
                for a in engines
                for b in engines
                if a != b and len(part := chosen[token_log.owner[chosen] == a])
            ),
            1.0,
        )

    def observe(self, context_tokens: float, seconds: float, how: str) -> None:
        assert how == self.how


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[WorkerPool]:
    with two_engines(actor_class(), FILES["A"], replace(SETTINGS, prefix_kv=True)) as made:
        yield made


@pytest.fixture(scope="module")
def roll_out(pool: WorkerPool) -> Any:

    weights = weights_of(FILES["A"])
    stored = stored_version(1, weights)

    def run(version: int, **options: Any) -> Any:
        shares = np.array_split(np.arange(len(ASKED)), len(pool.working))
        weights = replace(stored, version=version)
        driver = driver_of(pool, ASKED, weights, expected=100.0, interval_s=0.05, needed_next=2, **options)
        return driver.run(shares, deadline_s=400.0)

    return run


@pytest.fixture(scope="module")
def whole(roll_out: Any) -> Any:
    return roll_out(1).completions


def moved_often(roll_out: Any, whole: Any, how: str, versions: range) -> list[Any]:
    """Rollouts until ten requests were moved: on a busy machine one may be over before the driver has looked twice."""
    streams: list[Any] = []
    for version in versions:  # each its own, so that no cache has anything of the one before
        streams.append(roll_out(version, migration=ScriptedMoves(how)))
        assert_same(streams[-1].completions, whole)
        assert {done.versions for done in streams[-1].completions.values()} <= {((version, n),) for n in range(161)}
        if sum(len(stream.moved) for stream in streams) >= 10:
            return streams
    raise AssertionError(f"hardly anything was moved in {len(streams)} rollouts")


@pytest.mark.parametrize("stages", ["prefill", "pages", "copy, then pages", "late copy, then pages"])
def test_moves_during_decoding_change_no_response(
    pool: WorkerPool, roll_out: Any, whole: Any, stages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two stages full blocks go ahead, and with the cut those that were filled meanwhile; or all, if the copy has not arrived."""
    import ray

    import rlhfless_ray.rollout.inflight_migrations as moving

    how, copies, late = stages.split(", then ")[-1], "copy" in stages, "late" in stages
    monkeypatch.setattr(moving, "COPY_TOKENS", 2 * BLOCK if copies else 10**9)
    if late:
        monkeypatch.setattr(moving, "COPY_S", 0.0)
    before = ray.get([instance.actor.counts.remote() for instance in pool.working], timeout=60)
    first = {"prefill": 100, "pages": 200, "copy, then pages": 300, "late copy, then pages": 400}[stages]
    streams = moved_often(roll_out, whole, how, range(first, first + 40))
    after = ray.get([instance.actor.counts.remote() for instance in pool.working], timeout=60)
    moved = [one for stream in streams for one in stream.moved]
    assert {one.how for one in moved} == {how}
    loaded, copied, damaged = (
        sum(b.get(name, 0) - a.get(name, 0) for (_, a), (_, b) in zip(before, after, strict=True))
        for name in ("loaded", "copied", "damaged")
    )
    assert (copied > 10) == copies and all(0 < one.pause_s <= one.seconds for one in moved)
    assert (loaded > 10) == (how == "pages") and damaged == 0
    if how == "pages":
        came = [one for one in moved if not one.fell_back]
        assert len(came) > len(moved) / 2 and {one.computed_tokens for one in came} == {1}
        metrics = [stream.metrics() for stream in streams]
        assert sum(m["rollout/moved_by_pages"] for m in metrics) == len(moved)
        assert sum(m["rollout/move_fallbacks"] for m in metrics) == len(moved) - len(came)


def test_lost_pages_are_computed_again_and_counted(pool: WorkerPool, roll_out: Any, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine holds the ticket that they are asked for with. Only a request's first move of a rollout counts: an engine that it
    comes back to may have all but its last token in its own cache."""
    import rlhfless_ray.rollout.inflight_migrations as moving

    send = moving.EngineCalls.send

    def elsewhere(self: Any, number: int, indices: Any, what: str = "", pages: tuple[Any, ...] = ()) -> None:
        lost = tuple(pool.working[number].actor.hand_over.options(concurrency_group="pages").remote(-1) for _ in pages)
        send(self, number, indices, what, lost)

    monkeypatch.setattr(moving.EngineCalls, "send", elsewhere)
    streams = moved_often(roll_out, whole, "pages", range(30, 40))
    first_moves = [one for stream in streams for one in {one.key: one for one in reversed(stream.moved)}.values()]
    assert first_moves and all(one.fell_back and one.computed_tokens > 1 for one in first_moves)


def test_a_hung_engine_changes_no_response(pool: WorkerPool, roll_out: Any, whole: Any) -> None:
    """In the middle of moves it stops where no signal reaches; what it had, and what was on its way to it, goes on elsewhere."""
    import ray

    pid, calls = ray.get(pool.working[0].actor.counts.remote(), timeout=60)[0], iter(range(10**9))
    stopped: list[Any] = []

    def on_progress(done: int, total: int) -> None:
        if next(calls) == 4:
            os.kill(pid, signal.SIGSTOP)

    for version in (4, 5):  # on a busy machine it may be done with the first before the driver looks
        stopped.append(roll_out(version, on_progress=on_progress, migration=ScriptedMoves("pages"), silence_s=5.0))
        assert_same(stopped[-1].completions, whole)
        if stopped[-1].replaced:
            break
    assert (
        stopped[-1].replaced >= 1 and pool.faults.counts[FailureCause.HUNG] >= 1
    )  # on a busy machine a living one may be silent for so long
    assert pid not in [ray.get(i.actor.counts.remote(), timeout=300)[0] for i in pool.working]
