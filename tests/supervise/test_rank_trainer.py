"""Ray Train's number of ranks."""

from __future__ import annotations

import os

import pytest
from ray.train import ScalingConfig

from rlhfless_ray.supervise import rank_trainer
from rlhfless_ray.supervise.inbox import Inbox
from rlhfless_ray.supervise.rank_trainer import EvenRanks


@pytest.mark.parametrize(
    ("free", "least", "ranks"), [((4, 3), 1, 4), ((3,), 1, 2), ((8, 8), 1, 8), ((3, 3), 6, 6), ((3, 4), 6, 6), ((3, 2), 6, 5), ((), 1, 0)]
)
def test_ray_train_starts_ranks_that_share_copies_evenly(free: tuple[int, ...], least: int, ranks: int) -> None:
    """Of 7 ranks that should be 4 a copy, 4 share one; all 7 would hold the whole model each. Too few are not started at all."""
    policy = EvenRanks(ScalingConfig(num_workers=(least, 8), resources_per_worker={"CPU": 2}), sharing=4)
    assert policy._count_possible_workers({f"node-{i}": {"CPU": 2.0 * slots + 1} for i, slots in enumerate(free)}) == ranks


def test_ray_train_gets_the_drivers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer runs in an actor, whose process on a joined cluster has the environment of that cluster."""
    name = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    monkeypatch.setenv(name, "60")
    monkeypatch.setattr(rank_trainer, "train_ranks", lambda *_: KeyError(os.environ[name]))
    assert str(Inbox().train(None, None, False, False, {name: "600"})) == "'600'"  # type: ignore[arg-type]
