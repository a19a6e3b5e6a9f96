"""When the drafter's process counts as ready for work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.rollout import trained_drafter
from rlhfless_ray.rollout.trained_drafter import PASSES, TrainedDrafter
from rlhfless_ray.types import Completion, Prompt, Sample


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
        drafter.add_samples([Sample(Prompt(0, "p", (7, 8)), 0, done, action_mask=mask)])
    assert drafter.owed == PASSES * 5
    nan = np.float32(np.nan)
    for sequence, expected in zip(drafter.queue, ([nan, nan, -1, -2, -3], [nan, nan, -1, nan, -3]), strict=True):
        np.testing.assert_array_equal(sequence.logprobs, np.array(expected, np.float32))
