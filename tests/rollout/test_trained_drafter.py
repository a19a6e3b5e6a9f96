"""When the drafter's process gets work, and what becomes of its weights after a resume."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.rollout import trained_drafter
from rlhfless_ray.rollout.trained_drafter import PASSES, TrainedDrafter
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId


@pytest.mark.parametrize(
    ("started", "imported", "ready"), [(True, None, True), (False, "yes", True), (False, "no", False), (False, None, False)]
)
def test_a_process_is_ready_once_it_has_worked_or_imported(
    monkeypatch: pytest.MonkeyPatch, started: bool, imported: str | None, ready: bool
) -> None:
    """One that was started under a lease, because the leases of its parked processes were lost, was never started ahead."""
    monkeypatch.setattr(trained_drafter, "ray", SimpleNamespace(wait=lambda refs, timeout: ([ref for ref in refs if ref == "yes"], [])))
    instance: Any = SimpleNamespace(id="drafter-1", started=started)
    drafter = TrainedDrafter(SimpleNamespace(), SimpleNamespace(parked=[instance]))  # type: ignore[arg-type]
    drafter.owed = 1
    drafter.imported = {} if imported is None else {instance.id: imported}
    assert drafter.wants_slot == ready


def test_only_sampled_tokens_are_trained_on() -> None:
    """A failed episode has no token."""
    drafter = TrainedDrafter(SimpleNamespace(), SimpleNamespace(parked=[]))  # type: ignore[arg-type]
    whole, masked = np.array([-1.0, -2.0, -3.0], np.float32), np.array([True, False, True])
    for logprobs, mask in ((whole[:0], None), (whole, None), (whole, masked)):
        done = Completion(0, np.arange(len(logprobs), dtype=np.int32), logprobs, "stop", 1)
        drafter.add_samples([Sample(Prompt(0, "p", (7, 8)), SampleId(0, 1, 0), done, action_mask=mask)])
    assert drafter.owed == PASSES * 5
    nan = np.float32(np.nan)
    for sequence, expected in zip(drafter.queue, ([nan, nan, -1, -2, -3], [nan, nan, -1, nan, -3]), strict=True):
        np.testing.assert_array_equal(sequence.logprobs, np.array(expected, np.float32))


class Process:
    """An instance of the pool whose training call has ended at once."""

    def __init__(self, name: str) -> None:
        self.id, self.started, self.version, self.leases, self.slot = name, True, None, ["lease"], "slot"
        self.calls: list[tuple[int, int]] = []  # number of sequences and owed tokens of each call
        self.actor = SimpleNamespace(train=SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self.train)))

    def train(self, call: int, sequences: list[Any], tokens: int, *_: Any) -> tuple[str, str]:
        self.calls.append((len(sequences), tokens))
        return "result", "weights"


class Pool:
    def __init__(self, process: Process) -> None:
        self.parked, self.working = [process], []  # type: ignore[var-annotated]

    def fits(self, instance: Process, slot: Any) -> bool:
        return True

    def resize(self, count: int, leases: list[Any], need: int) -> list[Any]:
        self.working, self.parked = self.parked, []
        return leases[1:]

    def park(self, instance: Process) -> list[Any]:
        self.working, self.parked = [], [instance]
        return ["lease"]


def sample(tokens: int) -> Sample:
    return Sample(
        Prompt(0, "p", (7, 8)),
        SampleId(0, 1, 0),
        Completion(0, np.arange(tokens, dtype=np.int32), np.full(tokens, -1, np.float32), "stop", 1),
    )


def test_a_new_process_owes_no_tokens_of_sequences_that_were_lost_with_the_old_one() -> None:
    """Otherwise it would be called again and again without anything to learn, until more samples are there."""
    old, new = Process("drafter-1"), Process("drafter-2")
    pool: Any = Pool(old)
    drafter = TrainedDrafter(SimpleNamespace(), pool)  # type: ignore[arg-type]
    leases: Any = [SimpleNamespace(slot="slot")]
    drafter.add_samples([sample(5), sample(3)])
    assert drafter.start_ahead(leases, 100.0) == [] and old.calls == [(2, PASSES * 8)]
    drafter.running, pool.working, pool.parked = [], [], [new]  # the process has died
    assert drafter.wants_slot and drafter.start_ahead(leases, 100.0) == ["lease"]
    assert not drafter.wants_slot and not drafter.running and not new.calls and pool.parked == [new]
    drafter.add_samples([sample(2)])
    assert drafter.start_ahead(leases, 100.0) == [] and new.calls == [(1, PASSES * 2)]


def test_a_failure_is_counted_in_the_step_in_which_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when no process is called in the next step."""

    def lost(*_: Any) -> None:
        raise RunError("the process was killed")

    monkeypatch.setattr(trained_drafter, "get", lost)
    monkeypatch.setattr(trained_drafter, "lost_on_the_way", lambda ref: False)
    process = Process("drafter-1")
    process.failure = lambda: "killed"  # type: ignore[attr-defined]
    pool: Any = Pool(process)
    pool.end = lambda instance: pool.working.clear()
    context: Any = SimpleNamespace(
        record=SimpleNamespace(progress=SimpleNamespace(message=lambda text: None)), leases=SimpleNamespace(without_lost=lambda leases: [])
    )
    drafter = TrainedDrafter(context, pool)
    drafter.add_samples([sample(5)])
    drafter.start_ahead([SimpleNamespace(slot="slot")], 100.0)  # type: ignore[list-item]
    assert drafter._collect(0.0) == []
    assert [drafter.metrics()["drafter/failures"] for _ in range(2)] == [1, 0] and drafter.failures == 1


def test_a_resumed_run_continues_only_its_own_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_drafter, "ray", SimpleNamespace(put=lambda value: value))
    monkeypatch.setattr(trained_drafter, "get", lambda ref, *_: ref)
    said: list[str] = []

    def made(folder: str = "", layers: int = 1) -> TrainedDrafter:
        rollout = SimpleNamespace(drafter=folder, drafter_layers=layers, drafter_hidden_size=32)
        record = SimpleNamespace(progress=SimpleNamespace(message=said.append))
        return TrainedDrafter(SimpleNamespace(recipe=SimpleNamespace(rollout=rollout), record=record), SimpleNamespace(parked=[]))  # type: ignore[arg-type]

    drafter = made()
    drafter.version, drafter.weights = 3, {"w": np.ones(2, np.float32)}
    same = made()
    same.restore(drafter.files())
    assert same.version == 3 and same.weights["w"].tolist() == [1, 1] and same.moments is None and not said
    moments = {"w.exp_avg": np.full(2, 0.5, np.float32), "updates": np.array(7)}
    actor = SimpleNamespace(moments=SimpleNamespace(remote=lambda: moments))
    drafter.reader, drafter.pool.parked = "drafter-1", [SimpleNamespace(id="drafter-1", version=3, actor=actor)]  # type: ignore[list-item]
    files = drafter.files()
    same.restore(files)
    assert same.weights.keys() == {"w"} and same.moments["w.exp_avg"].tolist() == [0.5, 0.5] and same.moments["updates"] == 7
    for other in (made(layers=2), made("small-model")):
        other.restore(files)
        assert other.version == 0 and other.weights is None
    assert "began as 1 random layers of width 32, so small-model starts again" in said[-1]
