"""When the drafter's process counts as ready for work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.rollout import trained_drafter
from rlhfless_ray.rollout.trained_drafter import TrainedDrafter


@pytest.mark.parametrize(
    ("started", "imported", "ready"), [(True, None, True), (False, "yes", True), (False, "no", False), (False, None, False)]
)
def test_a_process_is_ready_that_has_worked_or_has_imported(
    monkeypatch: pytest.MonkeyPatch, started: bool, imported: str | None, ready: bool
) -> None:
    """One that was started under a lease, because the leases of its parked processes were lost, was never started ahead."""
    monkeypatch.setattr(trained_drafter, "ray", SimpleNamespace(wait=lambda refs, timeout: ([ref for ref in refs if ref == "yes"], [])))
    instance: Any = SimpleNamespace(id="drafter-1", started=started)
    drafter = TrainedDrafter(SimpleNamespace(), SimpleNamespace(parked=[instance]))  # type: ignore[arg-type]
    drafter.owed = 1
    drafter.imported = {} if imported is None else {instance.id: imported}
    assert drafter.wants_slot == ready
