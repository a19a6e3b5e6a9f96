"""The driver's side of scoring: what hangs, dies or fails too often is stopped early and named."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnschedulableError, ObjectLostError, RayActorError

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.failure_budget import FailureBudget, FailureCause
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.reward import scoring as module
from rlhfless_ray.reward.reward_actor import RewardActor
from rlhfless_ray.reward.reward_functions import RewardSource, RewardWorker
from rlhfless_ray.reward.scoring import Scoring, check_failures
from rlhfless_ray.reward.source import Score, item_factory
from rlhfless_ray.reward.user_file import UserFile
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId, Scored

ITEM = item_factory(RewardSource("task", "chain"), None)
ENDS = {
    "die": RayActorError(),
    "nowhere": ActorUnschedulableError("its node is gone"),
    "lost": ObjectLostError(ray.ObjectRef.nil().hex(), None, "its node took the answer along"),
}


def samples_of(*responses: str) -> list[Sample]:
    empty = Completion(0, np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0)
    return [Sample(Prompt(70 + i, f"p{i}", (1,)), SampleId(70 + i, 1, 0), empty, text) for i, text in enumerate(responses)]


class Process:
    """A scoring process: `die`, `lost` and `nowhere` end it, alone or with its node, `hang` keeps it for ever, `fail` is an error,
    `slow` uses up a call's time."""

    def __init__(self, calls: list[int]) -> None:
        self.score = SimpleNamespace(remote=lambda items, budget_s: self.answer(items))
        self.calls = calls

    def answer(self, items: list[Any]) -> Any:
        self.calls.append(len(items))
        scores = []
        for key, _, response, _ in items:
            if response in (*ENDS, "hang"):
                return SimpleNamespace(ready=response in ENDS, value=ENDS.get(response))
            scores.append(Score(key, None, "no") if response == "fail" else Score(key, float(len(response))))
            if response == "slow":
                break
        return SimpleNamespace(ready=True, value=(scores, []))


class FakePool:
    def __init__(self, workers: int) -> None:
        self.calls: list[int] = []
        self.faults = FailureBudget(3)
        self.causes: list[FailureCause] = []  # of the next deaths, where it is not the process itself
        self.ledger = SimpleNamespace(spans=lambda leases, spans: None)
        self.leases = SimpleNamespace(deadline_s=300.0)
        self.working = [self.new() for _ in range(workers)]

    def new(self) -> Any:
        return SimpleNamespace(actor=Process(self.calls), leases=[], started=True)

    def cause(self, worker: Any) -> FailureCause:
        return self.causes.pop(0) if self.causes else FailureCause.DIED

    def replace(self, worker: Any, why: str, cause: FailureCause, make_room: Any = None) -> Any:
        if make_room is not None and not self.leases.without_lost(worker.leases):
            make_room()
        self.faults.count("reward-1", cause, why)
        return self.new()

    def end_lost(self, worker: Any, why: str, cause: FailureCause) -> None:
        self.faults.count("reward-1", cause, why)
        self.working.remove(worker)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Time passes only where the driver waits and nothing is ready: a busy machine makes no call late."""
    if "ray_cluster" in request.fixturenames:
        return
    clock = SimpleNamespace(now_s=0.0)

    def get(ref: Any) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [ref for ref in refs if ref.ready][:1]
        clock.now_s += 0.0 if ready else timeout
        return ready, [ref for ref in refs if ref not in ready]

    class Ref(SimpleNamespace):
        __hash__ = object.__hash__

    monkeypatch.setitem(globals(), "SimpleNamespace", Ref)
    monkeypatch.setattr(module, "ray", SimpleNamespace(get=get, wait=wait, exceptions=module.ray.exceptions))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(module, "SLACK_S", -module.REPLY_AFTER_S)


def score_samples(
    pool: Any, samples: list[Sample], timeout_s: float, *, max_failed_share: float = 1.0, say: Callable[[str], None] = lambda _: None
) -> int:
    """How many failed, once all are scored or too many have failed. The scored samples take the places of the others."""
    scoring = Scoring(pool, timeout_s, max_failed_share * len(samples), ITEM, timeout_s)
    scoring.add(samples)
    try:
        scoring.finish(say)
    finally:
        samples[:] = scoring.newest(samples)
    return scoring.failed


def scored(pool: FakePool, samples: list[Sample], **more: Any) -> int:
    return score_samples(pool, samples, 0.01, **more)


@pytest.mark.parametrize("workers", [1, 3, 9])
def test_every_sample_gets_its_own_reward_also_over_many_answers(workers: int) -> None:
    samples = samples_of("a", "slow", "bbb", "fail", "slow", "", "slow")
    said: list[str] = []
    assert scored(FakePool(workers), samples, say=said.append) == 1
    assert [s.reward for s in samples] == [1.0, 4.0, 3.0, None, 4.0, 0.0, 4.0]
    assert [s.error for s in samples] == [None, None, None, "no", None, None, None]
    assert said[-1] == "score: 7 of 7 samples, 1 failed"


@pytest.mark.parametrize("bad", [*ENDS, "hang"])
def test_a_sample_that_ends_the_process_is_found_and_the_others_are_scored(bad: str) -> None:
    pool, samples = FakePool(1), samples_of("a", "bb", bad, "c", "dd")
    assert scored(pool, samples) == 1
    assert [s.reward for s in samples] == [1.0, 2.0, None, 1.0, 2.0]
    assert "hung past 0.01 s or died" in samples[2].error and pool.faults.used == 2


def test_a_lost_node_is_no_samples_fault() -> None:
    pool, samples = FakePool(1), samples_of("lost", "bb")
    pool.causes = [FailureCause.NODE_LOST, FailureCause.DIED, FailureCause.NODE_LOST, FailureCause.NODE_LOST]
    assert scored(pool, samples) == 1 and pool.faults.used == 2 and pool.faults.counts[FailureCause.NODE_LOST] == 3
    assert [s.reward for s in samples] == [None, 2.0] and len(pool.calls) == 6, "by itself only after a death, and again after a loss"


def test_a_worker_that_starts_for_long_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, samples = FakePool(1), samples_of("hang")
    pool.working[0].started = False
    scoring = Scoring(pool, 0.01, 1, ITEM, 0.01)
    scoring.add(samples)
    (call,) = scoring.running.values()
    call.sent_s -= 60.0
    assert not scoring.collect() and scoring.running
    call.start_by_s = 0.0
    call.sent_s -= 60.0
    assert scoring.collect() and pool.faults.used == 1 and not scoring.scored


@pytest.mark.parametrize("bad", ["die", "hang"])
def test_replacements_end_with_their_limit(bad: str) -> None:
    pool, samples = FakePool(1), samples_of(*[bad] * 16)
    with pytest.raises(RunError, match=r"max_replacements = 3 is used up: it hung past .* at prompt row 72 'p2', response"):
        scored(pool, samples)
    assert pool.faults.used == 3 and sum(isinstance(s, Scored) and s.error is not None for s in samples) == 3


def test_too_many_failures_stop_the_scoring() -> None:
    pool, samples = FakePool(1), samples_of("a", *["fail", "slow"] * 50)
    failed = scored(pool, samples, max_failed_share=0.05)
    assert failed == 6 and len(pool.calls) == 6, "5 of 101 may fail"
    with pytest.raises(RunError, match=r"6 of 101 samples .* 88 were not tried\); the first: no; prompt row 71"):
        check_failures(samples, failed, 0.05)
    tried = [s for s in samples if isinstance(s, Scored)]
    assert check_failures(tried, failed, 6 / len(tried)) == tried


def test_a_worker_answers_with_what_it_has_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.05)  # a sample takes 0.05 s
    monkeypatch.setattr("rlhfless_ray.reward.reward_functions.time", SimpleNamespace(monotonic=lambda: next(clock)))
    text = "def score(prompt, response, row):\n    return 1.0\n"
    worker = RewardWorker(RewardSource("file", "score", file=UserFile("mine.py", text)), 5.0)
    items = [(i, "", "", {}) for i in range(9)]
    assert [s.key for s in worker.score(items, 0.12)] == [0, 1, 2]
    assert [s.key for s in worker.score(items, 0.0)] == [0], "at least one, or it would never end"


DEADLY = "import os\ndef score(prompt, response, row):\n    if response == 'die':\n        os._exit(1)\n    return 1.0\n"


@pytest.mark.ray
def test_a_real_process_that_exits_is_replaced_and_the_sample_named(ray_cluster) -> None:
    from rlhfless_ray.functions.instance import start_actor

    ledger = Ledger("cpu", 1.0)
    leases = LeaseManager("cpu", ledger, 60.0, f"score{time.time_ns()}")
    source = RewardSource("file", "score", file=UserFile("mine.py", DEADLY))
    pool = WorkerPool("score", lambda slot: start_actor(RewardActor, slot, "cpu", {}, source, 1.0), leases, 60.0)
    try:
        pool.resize(1, [])
        samples = samples_of("a", "die", "b")
        assert score_samples(pool, samples, 1.0) == 1 and pool.faults.used == 2
        assert [s.reward for s in samples] == [1.0, None, 1.0]
        with pytest.raises(RunError, match=r"used up: it hung past .* or died at prompt row 71 'p1', response 'die'"):
            score_samples(pool, samples_of("a", "die", "b"), 1.0)
    finally:
        pool.close()
        leases.release_all()


@pytest.mark.ray
def test_a_reward_model_and_a_reward_file_score_in_real_pools(ray_cluster, tmp_path) -> None:
    import ray

    from rlhfless_ray.functions.instance import start_actor
    from rlhfless_ray.reward.openrlhf_reward import QuerySource
    from rlhfless_ray.reward.reward_model import RewardModelSource, find_head
    from rlhfless_ray.weights.model_folder import write_folder
    from tests.reward.reward_models import reward_model
    from tests.reward.test_model import by_transformers

    text = "import os\ndef reward_func(q, p, l):\n    if any('9' in x for x in q): os._exit(1)\n    return [len(x) for x in q]"
    files = reward_model()
    write_folder(tmp_path, files)
    sources = [
        RewardModelSource(files, find_head(files, "score", False), "float32", 64, 60.0),
        QuerySource(UserFile("mine.py", text), "reward_func", "answer", 2),
    ]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(str, ids)))
    ledger = Ledger("cpu", 1.0)
    leases = LeaseManager("cpu", ledger, 60.0, f"score{time.time_ns()}")
    for source in sources:
        shared = ray.put(source)
        pool = WorkerPool(
            source.pool_kind,
            lambda slot, shared=shared: start_actor(RewardActor, slot, "cpu", {}, shared, 2.0, "cpu"),
            leases,
            60.0,
            on_device=source.on_device,
        )
        try:
            drawn = [np.array([5 + 4 * (i == 1)] * (i + 1), np.int32) for i in range(4)]
            given = zip(samples_of(*"abcd"), drawn, strict=True)
            samples = [replace(sample, completion=replace(sample.completion, token_ids=tokens)) for sample, tokens in given]
            spare = pool.resize(2, [])
            scoring = Scoring(pool, 2.0, 4, item_factory(source, tokenizer), source.call_s(2.0))
            scoring.add(samples)
            scoring.finish()
            samples = scoring.newest(samples)
            if source is sources[0]:
                expected = by_transformers(tmp_path, [np.array([1, *s.completion.token_ids]) for s in samples])
                np.testing.assert_allclose([s.reward for s in samples], expected, atol=2e-5)
            else:
                # '199' ends its process; the others of its batch are scored
                assert [s.reward for s in samples] == [2.0, None, 4.0, 5.0] and "died" in samples[1].error
            assert not spare
        finally:
            leases.release(pool.close())
        assert ledger.held_slot_s(source.pool_kind, 0) > 0, "billed under its own name"


def test_a_worker_whose_node_is_lost_while_engines_work_is_not_waited_for() -> None:
    """They may hold every slot that is remaining: its share is scored with what is scored next."""
    pool, samples = FakePool(1), samples_of("lost", "bb", "ccc")
    pool.causes, pool.leases.without_lost = [FailureCause.NODE_LOST], lambda leases: []
    scoring = Scoring(pool, 0.01, 1, ITEM, 0.01)
    scoring.add(samples[:2])
    assert scoring.collect(can_wait=False) and not scoring.running and not pool.working and pool.faults.counts[FailureCause.NODE_LOST] == 1
    scoring.unassigned = [([(0, "", "a", {}), *remaining[1:]], one_by_one) for remaining, one_by_one in scoring.unassigned]
    pool.working = [pool.new()]
    scoring.add(samples[2:])
    scoring.finish()
    assert [s.reward for s in scoring.newest(samples)] == [1.0, 2.0, 3.0] and len(scoring.scored) == 3 and pool.faults.used == 0


def test_a_worker_whose_node_is_lost_gets_a_slot_that_the_run_keeps_for_its_next_phase() -> None:
    """Ray would never grant what the run itself holds."""
    pool, samples, released = FakePool(1), samples_of("lost"), list[str]()
    pool.causes, pool.leases.without_lost = [FailureCause.NODE_LOST], lambda leases: []
    scoring = Scoring(pool, 0.01, 1, ITEM, 0.01, make_room=lambda: released.append("free leases"))
    scoring.add(samples)
    assert scoring.collect() and scoring.running and released == ["free leases"]


def test_a_worker_that_dies_while_engines_work_is_replaced_under_its_lease() -> None:
    pool, samples = FakePool(1), samples_of("die", "bb")
    pool.leases.without_lost = lambda leases: ["its own"]
    scoring = Scoring(pool, 0.01, 1, ITEM, 0.01)
    scoring.add(samples)
    assert scoring.collect(can_wait=False) and scoring.running and pool.faults.used == 1


@pytest.mark.parametrize("can_wait", [True, False])
@pytest.mark.parametrize("cause", [FailureCause.DIED, FailureCause.NODE_LOST])
def test_all_calls_of_a_lost_worker_go_to_one_successor(can_wait: bool, cause: FailureCause) -> None:
    """Samples that finish later are sent to a worker that is busy still."""
    pool, samples = FakePool(1), samples_of("lost", "bb", "ccc", "dddd")
    pool.causes = [cause]
    pool.leases.without_lost = lambda leases: ["its own"] if cause is FailureCause.DIED else []
    scoring = Scoring(pool, 0.01, 4, ITEM, 0.01)
    worker = pool.working[0]
    worker.actor.score.remote = lambda items, budget_s: SimpleNamespace(ready=True, value=ENDS["die"])
    scoring.add(samples[:2])
    scoring.add(samples[2:])
    assert len(scoring.running) == 2
    for call in scoring.running.values():
        call.remaining = [(key, "", "a" if key == 0 else samples[key].text, {}) for key, *_ in call.remaining]
    assert scoring.collect(can_wait=can_wait) and sum(pool.faults.counts.values()) == 1, "one process, one loss"
    if scoring.unassigned:
        assert not can_wait and cause is FailureCause.NODE_LOST and not scoring.running
        pool.working = [pool.new()]
        scoring.add([])
    scoring.finish()
    assert [s.reward for s in scoring.newest(samples)] == [1.0, 2.0, 3.0, 4.0] and sum(pool.faults.counts.values()) == 1
