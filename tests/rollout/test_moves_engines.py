"""Real engines in processes of their own, and the driver that moves their requests, with their KV pages and without, and kills
one: what comes out is what a rollout without moves gives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from asking import BLOCK, FILES, assert_same, requests, weights_of

from placement.policy import Hold
from rlhfless_ray.functions.instance import start_actor
from rlhfless_ray.functions.lease import Leases
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.rollout.migrate import Wish, Wishes
from rlhfless_ray.types import Request, WeightVersion
from rlhfless_ray.weights.folder import without_weights
from rlhfless_ray.weights.version import checksum

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(600)]

SETTINGS = {
    "device": "cpu", "max_model_len": 320, "dtype": "float32", "trust_remote_code": False, "max_running": 64, "block_size": BLOCK,
    "kv_cache_mb": 64, "gpu_memory_share": 0.5, "prefix_kv": True,
}
LONG = [r for r in requests(96, seed=70) if len(r.token_ids) > 2 * BLOCK]
ASKED = [Request(i, r.token_ids, r.seed, 160, 0.0 if i % 3 == 0 else 1.0) for i, r in enumerate(LONG[:20])]


def actor_class() -> type:
    from rlhfless_ray.rollout.actor import RolloutActor

    class Counting(RolloutActor):
        def counts(self) -> tuple[int, dict[str, int]]:
            return os.getpid(), dict(self.engine.pages.counts)

    return Counting


class Whims:
    """Moves whatever is not where it should be, one way; where that is changes with every look."""

    def __init__(self, how: str) -> None:
        self.how, self.looks = how, 0

    def decide(self, transcript: Any, engines: list[int], steps: list[Any]) -> Wishes:
        self.looks += 1
        live = np.flatnonzero(~transcript.finished & (transcript.length > 0))
        chosen = live[(live + self.looks) % 2 == 0]
        return Wishes(
            tuple(
                Wish(part, a, b, "a whim", self.how)
                for a in engines for b in engines
                if a != b and len(part := chosen[transcript.owner[chosen] == a])
            ), 1.0,
        )

    def observe(self, context_tokens: float, seconds: float, how: str) -> None:
        assert how == self.how


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[Pool]:
    ledger = Ledger("cpu", 1.0)
    leases = Leases("cpu", ledger, 60.0, f"engines{time.time_ns()}")
    kind, files = actor_class(), without_weights(FILES["A"])
    made = Pool("rollout", lambda slot: start_actor(kind, slot, "cpu", {}, files, SETTINGS), leases, ledger, 600.0)
    made.resize(2, [], need=2)
    for instance in made.working:
        instance.told(300.0)
    yield made
    made.close()
    leases.release_all()


@pytest.fixture(scope="module")
def roll_out(pool: Pool) -> Any:
    import ray

    from rlhfless_ray.rollout.stream import run_rollout

    weights = weights_of(FILES["A"])
    ref, total = ray.put(weights), checksum(weights)

    def run(version: int, **options: Any) -> Any:
        given = {"migration": None, "on_progress": lambda *_: None, **options}
        shares = np.array_split(np.arange(len(ASKED)), len(pool.working))
        return run_rollout(
            pool, ASKED, shares, np.full(len(ASKED), 100.0), WeightVersion(version, ref, total), interval_s=0.05, deadline_s=400.0,
            silence_s=60.0, needed_next=2, drained=lambda tail_s, needed: Hold(1, "kept"), give_back=lambda *_: None, **given,
        )

    return run


@pytest.fixture(scope="module")
def whole(roll_out: Any) -> Any:
    return roll_out(1).completions


@pytest.mark.parametrize("how", ["prefill", "pages"])
def test_moved_while_they_decode_responses_stay_what_they_are(pool: Pool, roll_out: Any, whole: Any, how: str) -> None:
    import ray

    version = 2 if how == "prefill" else 3  # so that no cache has anything of the run before
    before = ray.get([instance.actor.counts.remote() for instance in pool.working], timeout=60)
    stream = roll_out(version, migration=Whims(how))
    after = ray.get([instance.actor.counts.remote() for instance in pool.working], timeout=60)
    assert_same(stream.completions, whole)
    assert {done.versions for done in stream.completions.values()} <= {((version, n),) for n in range(161)}
    assert len(stream.moved) >= 10 and {one.how for one in stream.moved} == {how}
    loaded, damaged = (
        sum(b.get(name, 0) - a.get(name, 0) for (_, a), (_, b) in zip(before, after, strict=True)) for name in ("loaded", "damaged")
    )
    assert (loaded > 10) == (how == "pages") and damaged == 0
    if how == "pages":
        came = [one for one in stream.moved if not one.fell_back]
        assert len(came) > len(stream.moved) / 2 and {one.computed_tokens for one in came} == {1}
        metrics = stream.metrics()
        assert metrics["rollout/moved_by_pages"] == len(stream.moved)
        assert metrics["rollout/move_fallbacks"] == len(stream.moved) - len(came)


def test_pages_that_are_lost_on_the_way_are_computed_and_counted(
    pool: Pool, roll_out: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has the ticket that they are asked for with."""
    import rlhfless_ray.rollout.moving as moving

    send = moving.Launches.send

    def elsewhere(self: Any, number: int, indices: Any, what: str = "", pages: tuple[Any, ...] = ()) -> None:
        lost = tuple(pool.working[number].actor.hand_over.options(concurrency_group="pages").remote(-1) for _ in pages)
        send(self, number, indices, what, lost)

    monkeypatch.setattr(moving.Launches, "send", elsewhere)
    stream = roll_out(5, migration=Whims("pages"))
    assert_same(stream.completions, whole)
    assert len(stream.moved) >= 10 and all(one.fell_back for one in stream.moved)
    assert all(one.computed_tokens > 1 for one in stream.moved)


def test_a_killed_engine_changes_nothing(pool: Pool, roll_out: Any, whole: Any) -> None:
    import ray

    pid, calls = ray.get(pool.working[0].actor.counts.remote(), timeout=60)[0], iter(range(10**9))

    def on_progress(done: int, total: int) -> None:
        if next(calls) == 4:
            os.kill(pid, signal.SIGKILL)

    stream = roll_out(4, on_progress=on_progress, migration=Whims("pages"))
    assert stream.replaced == 1 and len(pool.working) == 1
    assert_same(stream.completions, whole)
