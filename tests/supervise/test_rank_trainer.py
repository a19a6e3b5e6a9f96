"""The trainer of a supervised stage's ranks."""

from __future__ import annotations

import os

import pytest

from rlhfless_ray.supervise import rank_trainer
from rlhfless_ray.supervise.inbox import Inbox


def test_ray_train_gets_the_drivers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer runs in an actor, whose process on a joined cluster has the environment of that cluster."""
    name = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    monkeypatch.setenv(name, "60")
    monkeypatch.setattr(rank_trainer, "train_ranks", lambda *_: KeyError(os.environ[name]))
    assert str(Inbox().train(None, None, False, False, {name: "600"})) == "'600'"  # type: ignore[arg-type]
