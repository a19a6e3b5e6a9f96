"""Requests moved between living engines, engines killed, orders lost: every response comes out whole, on scripted engines
in real processes under real leases."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from placement.scaling.resize_policy import Decision, Hold, Release
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.failure_budget import FailureBudget, FailureCause
from rlhfless_ray.functions.instance import start_actor
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.inflight_migrations import MigrationRequest
from rlhfless_ray.rollout.migration_policy import MigrationPolicy, MigrationRequests
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Request, WeightVersion
from tests.conftest import lives
from tests.rollout_drivers import driver_of

pytestmark = pytest.mark.ray

TOKEN_S = 0.004
INTERVAL_S = 0.05


def token(seed: int, position: int) -> int:
    return (seed * 31 + position * 7) % 97


def engine_class(accepts_commands: bool = True) -> type:
    """Decodes a token of every request each TOKEN_S; a request's seed is also its length. It writes down what it generates,
    where a death does not reach, and waits for a driver that is slow to read: no more than five tokens for each byte of the
    file `pace`. With `accepts_commands` false it loses every command. Local, so that Ray ships it by value."""
    from rlhfless_ray.engine.control_queue import ControlQueue, EngineCommand
    from rlhfless_ray.engine.token_deltas import CUT, GOES_ON, STOP, TokenDeltas
    from rlhfless_ray.types import EngineStep, Span

    token_s, draw = TOKEN_S, token

    class Engine:
        concurrency_groups: ClassVar = {"control": 1}

        def __init__(self, log: str, pace: str) -> None:
            self.control_queue, self.log, self.pace, self.steps = ControlQueue(), log, pace, 0
            self.texts: dict[int, list[int]] = {}  # received for drafts, by name
            self.learned: dict[str, Any] = {}

        def open(self, threads: int) -> dict[str, Any]:
            return {"memory_mb": 1.0, "spans": []}

        def load(self, version: int, weights: Any, expected: int) -> list[Any]:
            self.version = version
            return []

        def pid(self) -> int:
            return os.getpid()

        def enqueue(self, epoch: int, command: EngineCommand) -> bool:
            return accepts_commands and self.control_queue.put(epoch, command)

        def received(self) -> tuple[dict[int, list[int]], dict[str, Any]]:
            return self.texts, self.learned

        def receive(self, drafts: Any) -> None:
            if drafts is not None:
                self.learned = drafts.learned or self.learned
                for name, tokens in drafts.texts:
                    self.texts[name] = self.texts.get(name, []) + tokens.tolist()

        def rollout(self, epoch: int, requests: list[Request], interval_s: float, threads: int, drafts: Any = None) -> Iterator[Any]:
            self.control_queue.open(epoch)
            self.receive(drafts)
            live = {r.key: [r, len(r.generated), len(r.generated)] for r in requests}  # generated, reported
            start = last = time.time()
            log = open(f"{self.log}.{os.getpid()}", "a", buffering=1)  # noqa: SIM115

            def progress(cut: set[int]) -> tuple[TokenDeltas, EngineSteps, list[Span]]:
                nonlocal start
                news, tokens, logprobs = [], [], []
                for key, one in list(live.items()):
                    request, done, reported = one
                    end = STOP if done == request.seed else CUT if key in cut else GOES_ON
                    news.append((key, reported, done - reported, end))
                    tokens += [draw(request.seed, p) for p in range(reported, done)]
                    logprobs += [-float(p) for p in range(reported, done)]
                    one[2] = done
                    if end:
                        del live[key]
                span = Span("work", "generate", start, time.time())
                start = span.to_s
                deltas = TokenDeltas.of(self.version, news, tokens, np.array(logprobs))
                return (
                    replace(deltas, observed=[(np.array([3, 4]), np.array([True, False]))]),
                    EngineSteps([EngineStep(1, 1, 1, token_s, work_s=token_s)]),
                    [span],
                )

            while live or not self.control_queue.close_if_empty():
                for command in self.control_queue.take():
                    self.receive(command.drafts)
                    for request in command.add:
                        assert request.key not in live
                        live[request.key] = [request, len(request.generated), len(request.generated)]
                    if command.cut:
                        now = time.time()
                        report = progress(set(command.cut))
                        report[2].append(Span("transfer", command.what, now, now + 1e-3))
                        yield report
                time.sleep(token_s)
                goes = self.steps < 5 * os.stat(self.pace).st_size
                self.steps += goes
                for one in live.values() if goes else ():
                    log.write(f"{one[0].key} {one[1]}\n")
                    one[1] += 1
                if time.time() - last >= interval_s or any(one[1] == one[0].seed for one in live.values()):
                    last = time.time()
                    yield progress(set())

    return Engine


class ScriptedMoves(MigrationPolicy):
    """A migration policy that moves the (request, target engine) pairs that `decide` returns."""

    def __init__(self, decide: Callable[[Any, list[int]], list[tuple[int, int]]]) -> None:
        super().__init__("auto", 0.7)
        self.choose, self.took = decide, list[float]()

    def decide(self, token_log: Any, engines: list[int], steps: list[Any], leaving: object = ()) -> MigrationRequests:
        moves = []
        for i, target in self.choose(token_log, engines):
            source = int(token_log.owner[i])
            if source != target and source in engines:
                moves.append(MigrationRequest(np.array([i]), source, target, "test"))
        return MigrationRequests(tuple(moves), time_saved_s=1.0, reason="test")

    def observe(self, context_tokens: float, seconds: float, how: str = "prefill") -> None:
        self.took.append(seconds)


class RunContext:
    def __init__(self, folder: Path, accepts_commands: bool = True) -> None:
        self.log = folder / "generated"
        self.pace = folder / "pace"
        self.pace.write_bytes(b"." * 10)
        self.ledger = Ledger("cpu", 1.0)
        self.leases = LeaseManager("cpu", self.ledger, 60.0, f"moves{time.time_ns()}")
        kind = engine_class(accepts_commands)
        self.pool = WorkerPool("rollout", lambda slot: start_actor(kind, slot, "cpu", {}, str(self.log), str(self.pace)), self.leases, 60.0)
        self.given: list[tuple[str, Decision]] = []

    def pids(self) -> list[int]:
        import ray

        return ray.get([instance.actor.pid.remote() for instance in self.pool.working], timeout=60)

    def give_back(self, instance: Any, decision: Decision) -> None:
        self.given.append((instance.id, decision))
        if decision.action == "Release":
            self.leases.release(self.pool.park(instance))

    def run(
        self, lengths: list[int], shares: list[list[int]], drained: Any = lambda tail_s, needed: Hold(1, "kept"), **options: Any
    ) -> Any:
        on_progress = options.pop("on_progress", lambda *_: None)

        def paced(done: int, total: int) -> None:
            with self.pace.open("ab") as file:
                file.write(b".")
            on_progress(done, total)

        requests = [Request(key, (1, 2, 3), length, 10**6, 1.0) for key, length in enumerate(lengths)]
        given: dict[str, Any] = {"silence_s": 30.0, "interval_s": INTERVAL_S, "decide": drained, "give_back": self.give_back, **options}
        driver = driver_of(self.pool, requests, WeightVersion(4, ()), expected=lengths, on_progress=paced, **given)
        stream = driver.run([np.array(share) for share in shares], deadline_s=300.0)
        for key, length in enumerate(lengths):
            done = stream.completions[key]
            assert done.token_ids.tolist() == [token(length, p) for p in range(length)]
            assert done.logprobs.tolist() == [-float(p) for p in range(length)]
            assert done.versions == ((4, length),) and done.finish_reason == "stop"
        return stream

    def generated(self) -> Counter[tuple[int, int]]:
        logs = self.log.parent.glob(f"{self.log.name}.*")
        lines = [line.split() for log in logs for line in log.read_text().splitlines()]
        return Counter((int(line[0]), int(line[1])) for line in lines if len(line) == 2)


@pytest.fixture(autouse=True)
def decides_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a driver on a busy machine, where deciding takes long, would hardly decide while a short rollout lasts."""
    monkeypatch.setattr("rlhfless_ray.rollout.migration_policy.DECIDING_SHARE", 1e9)


@pytest.fixture
def context(ray_cluster: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunContext]:
    made = RunContext(tmp_path, getattr(request, "param", True))
    yield made
    made.pool.close()
    made.leases.release_all()


def killer(context: RunContext, engine: int, at: int, number: signal.Signals = signal.SIGKILL) -> Callable[[int, int], None]:
    """Kills an engine at the call number `at` of on_progress, as soon as something more was generated; or stops it."""
    pid, calls = context.pids()[engine], iter(range(10**9))

    def on_progress(done: int, total: int) -> None:
        log = Path(f"{context.log}.{pid}")
        if log.exists() and next(calls) == at:  # on a busy machine the others may have reported much before this one begins
            before, end = log.stat().st_size, time.monotonic() + 60
            while log.stat().st_size == before and time.monotonic() < end:
                time.sleep(1e-3)
            os.kill(pid, number)

    return on_progress


def test_engines_share_tokens_of_sibling_responses_also_after_a_resume(context: RunContext) -> None:
    """All requests have one prompt. A response may outlive the news of its last tokens, so the end may be missing."""
    import ray

    from rlhfless_ray.rollout.shared_drafts import SharedDrafts

    context.pool.resize(2, [], need=2)
    shared, lengths, engines = SharedDrafts(), [120, 130, 140, 150], list(context.pool.working)
    assert len(ray.get([engine.actor.pid.remote() for engine in engines], timeout=240)) == 2, "they have started"
    texts = [[token(length, p) for p in range(length)] for length in lengths]

    def run(drafts: SharedDrafts, shares: list[list[int]]) -> list[tuple[dict[int, list[int]], dict[str, Any]]]:
        context.run(lengths, shares, plugins=[drafts])
        return [ray.get(instance.actor.received.remote(), timeout=60) for instance in engines]

    for (received, _), others in zip(run(shared, [[0, 1], [2, 3]]), ((2, 3), (0, 1)), strict=True):
        assert sorted(received) == list(others)
        assert all(len(tokens) > 20 and tokens == texts[i][: len(tokens)] for i, tokens in received.items())
    learned = shared.state()["learned"]
    assert learned["tried"][0] == learned["tried"][1] == learned["accepted"][0] > 2, "of every report"
    assert learned["terms"] is not None
    resumed = SharedDrafts()
    resumed.names = itertools.count(1000)  # the run's engines would be new
    resumed.restore(shared.state())
    for received, known in run(resumed, [[0], [1, 2, 3]]):
        assert [received[name] for name in range(1000, 1004)] == texts and known == learned


@pytest.mark.parametrize("engines", [1, 2])
def test_a_killed_engine_costs_at_most_one_interval_of_tokens(context: RunContext, engines: int) -> None:
    """On the living engine at once, or where there is none on the successor, which knows the tokens that were reported."""
    context.pool.resize(engines, [], need=engines)
    first = context.pool.working[0]
    lengths = [150 + 10 * i for i in range(6)]
    shares = [[0, 1, 2], [3, 4, 5]] if engines == 2 else [[0, 1, 2, 3, 4, 5]]
    stream = context.run(lengths, shares, on_progress=killer(context, 0, at=10))
    assert set(context.generated().values()) <= {1, 2}
    most = max(Counter(key for (key, _), times in context.generated().items() if times > 1).values(), default=0)
    assert most * TOKEN_S <= 2 * INTERVAL_S  # a report may be on its way when the process dies
    assert stream.replaced == 1 and stream.orphans == len(shares[0]) and first not in context.pool.working
    assert 0 < stream.metrics()["rollout/lost_s"] < 200
    if engines == 2:
        assert len(context.pool.working) == 1 and len(context.leases.held) == 1  # nobody waits for a successor: its lease is back
        assert [instance.slot.node for instance in context.pool.parked] == [first.slot.node]  # a process for the next rollout
    else:
        assert len(context.pool.working) == 1 and context.pool.working[0] is not first


def test_exceeding_the_failure_budget_ends_the_run(context: RunContext) -> None:
    context.pool.resize(2, [], need=2)
    context.pool.faults = FailureBudget(0)
    with pytest.raises(RunError, match=r"died, and functions.max_replacements = 0 is used up"):
        context.run([300, 300], [[0], [1]], on_progress=killer(context, 0, at=4))


@pytest.mark.parametrize("engines", [1, 2])
def test_a_hung_engine_is_ended_and_its_requests_continue(context: RunContext, engines: int) -> None:
    """Its process lives, but it neither reports nor answers a call."""
    context.pool.resize(engines, [], need=engines)
    context.pool.faults = FailureBudget(100)  # on a busy machine a living one may be silent for so long, too
    first, pid = context.pool.working[0], context.pids()[0]
    lengths = [150 + 10 * i for i in range(6)]
    shares = [[0, 1, 2], [3, 4, 5]] if engines == 2 else [[0, 1, 2, 3, 4, 5]]
    stream = context.run(lengths, shares, on_progress=killer(context, 0, at=10, number=signal.SIGSTOP), silence_s=3.0)
    assert stream.replaced >= 1 and stream.orphans >= len(shares[0]) and first not in context.pool.working
    assert stream.replaced > 1 or stream.orphans == len(shares[0])
    assert context.pool.faults.counts == {FailureCause.HUNG: stream.replaced}
    end = time.monotonic() + 90
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not lives(pid), "it would keep its memory, and its device"


def test_an_engine_that_hangs_while_starting_is_ended(context: RunContext) -> None:
    context.pool.resize(2, [], need=2)
    os.kill(context.pids()[0], signal.SIGSTOP)
    first = context.pool.working[0]
    first.opened = first.actor.open.remote(1)  # as if it had only been called
    context.leases.deadline_s = 2.0
    stream = context.run([100, 110, 120], [[0, 1], [2]], silence_s=30.0)
    assert stream.replaced == 1 and stream.orphans == 2 and first not in context.pool.working
    assert context.pool.faults.counts == {FailureCause.HUNG: 1}


def test_constant_moves_change_no_response(context: RunContext) -> None:
    """Every few tokens something is moved somewhere: to engines that are just ending, out of engines that have just begun."""
    context.pool.resize(3, [], need=3)
    rng = np.random.default_rng(1)

    def choose(token_log: Any, engines: list[int]) -> list[tuple[int, int]]:
        live = np.flatnonzero(~token_log.finished)
        return [(int(i), int(rng.choice(engines))) for i in live[rng.random(len(live)) < 0.3]]

    context.pids()  # so that all are there when the first thing moves
    moves = ScriptedMoves(choose)
    lengths = [int(n) for n in rng.integers(1, 250, 24)]
    moved = runs = 0
    while moved <= 30 and runs < 10:  # on a busy machine few of them fit into one
        stream = context.run(lengths, [list(range(a, 24, 3)) for a in range(3)], migration=moves)
        moved, runs = moved + len(stream.moved), runs + 1
        assert len(moves.took) == moved and stream.orphans == stream.replaced == 0
        assert set(context.generated().values()) == {runs}  # a move repeats nothing
    assert moved > 30


def test_a_death_during_moves_loses_no_token(context: RunContext) -> None:
    rng = np.random.default_rng(2)

    def choose(token_log: Any, engines: list[int]) -> list[tuple[int, int]]:
        live = np.flatnonzero(~token_log.finished)
        return [(int(i), int(rng.choice(engines))) for i in live[rng.random(len(live)) < 0.5]]

    lengths = [int(n) for n in rng.integers(150, 300, 12)]
    shares, moved, runs = [list(range(a, 12, 3)) for a in range(3)], 0, 0
    while moved <= 5 and runs < 5:  # on a busy machine few moves fit into one
        context.pool.resize(3, [], need=3)
        stream = context.run(lengths, shares, migration=ScriptedMoves(choose), on_progress=killer(context, 1, at=15))
        assert stream.replaced == 1
        moved, runs = moved + len(stream.moved), runs + 1
    assert moved > 5


@pytest.mark.parametrize("context", [False], indirect=True)
def test_requests_finish_although_all_commands_are_lost(context: RunContext) -> None:
    """No engine accepts commands: requests that should be cut stay, and those of a dead engine go on when the living one's call is over."""
    context.pool.resize(2, [], need=2)
    away = ScriptedMoves(lambda token_log, engines: [(i, 1) for i in np.flatnonzero(~token_log.finished & (token_log.owner == 0))])
    stream = context.run([200, 210, 100, 110], [[0, 1], [2, 3]], migration=away, on_progress=killer(context, 0, at=8))
    assert stream.moved == [] and stream.orphans == 2


def test_an_engine_whose_requests_moved_away_is_released_and_the_ledger_names_the_move(context: RunContext) -> None:
    context.pool.resize(2, [], need=2)
    first, second = context.pool.working
    moved_at_s = []

    def choose(token_log: Any, engines: list[int]) -> list[tuple[int, int]]:
        if moved_at_s or token_log.length.min() < 40:
            return []
        moved_at_s.append(time.time())
        return [(0, 1), (1, 1), (2, 1)]

    class Together(ScriptedMoves):
        def decide(self, token_log: Any, engines: list[int], steps: list[Any], leaving: object = ()) -> MigrationRequests:
            moves = super().decide(token_log, engines, steps)
            whole = [np.concatenate([move.requests for move in moves.moves])] if moves.moves else []
            return MigrationRequests(tuple(MigrationRequest(part, 0, 1, "test") for part in whole), 1.0, "test")

    stream = context.run([300] * 4, [[0, 1, 2], [3]], migration=Together(choose), drained=lambda tail_s, needed: Release(0, "not needed"))
    assert [name for name, _ in context.given] == [first.id] and first in context.pool.parked
    assert {(one.key, one.source, one.target) for one in stream.moved} == {(k, first.id, second.id) for k in range(3)}
    assert all(43 <= one.context_tokens < 303 and 0 < one.seconds < 200 for one in stream.moved)
    context.ledger.close()
    rows = [row for row in context.ledger.rows if row.instance == first.id and row.slots]
    assert [row.what for row in rows if row.activity == "transfer"] == [f"move 3 sequences to {second.id}"]
    assert stream.metrics()["rollout/moved"] == 3 and stream.metrics()["rollout/move_reason"] == "3 moved: test"
    ended = {row.instance: row.to_s for row in context.ledger.rows if row.slots}
    assert ended[first.id] < ended[second.id] - 0.1


def test_a_move_that_only_saves_a_lease_is_not_made_if_the_lease_is_kept(context: RunContext) -> None:
    context.pool.resize(2, [], need=2)

    class Saver(ScriptedMoves):
        def decide(self, token_log: Any, engines: list[int], steps: list[Any], leaving: object = ()) -> MigrationRequests:
            return MigrationRequests(super().decide(token_log, engines, steps).moves, 0.0, "saves a lease")

    saver = Saver(lambda token_log, engines: [(0, 1)] if not token_log.finished[0] else [])
    assert context.run([120, 120], [[0], [1]], migration=saver).moved == []
    assert len(context.run([120, 120], [[0], [1]], migration=saver, drained=lambda *_: Release(0, "go")).moved) == 1
