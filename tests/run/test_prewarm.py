"""Which engines' processes a run starts while its learner starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.functions.lease import Slot
from rlhfless_ray.runtime.start_run import prewarm


@pytest.mark.parametrize(("width", "most", "expected"), [(1, 8, ["0", "1"]), (1, 1, ["0"]), (2, 8, [])])
def test_on_gpu_engines_start_on_the_devices_of_the_learner(width: int, most: int, expected: list[str]) -> None:
    """Other devices are unknown before a lease, and an engine of several may get others."""
    started: list[Slot] = []
    ranks = [Slot("other", "0"), Slot("node", "0"), Slot("node", "1"), Slot("node", "1")]
    limits = SimpleNamespace(slots={"node": 2})  # where engines may start
    context: Any = SimpleNamespace(leases=SimpleNamespace(resource="gpu"), limits=lambda: limits, most_engines=lambda width: most)
    learn = SimpleNamespace(worker_group=SimpleNamespace(by_rank=[SimpleNamespace(slot=slot) for slot in ranks]))
    rollout = SimpleNamespace(pool=SimpleNamespace(width=width, prewarm=started.append))
    stages: Any = SimpleNamespace(learn=learn, rollout=rollout, agents=object())
    prewarm(context, stages, ranks[0])
    assert [slot.device for slot in started] == expected
