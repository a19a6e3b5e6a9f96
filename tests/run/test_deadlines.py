"""Waits that end in time, whatever Ray does."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError


def test_a_value_that_is_made_and_does_not_come_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies on a node that does not answer, and Ray says that it is ready as soon as it is made."""

    def fetch(ref: Any, *, timeout: float | None = None) -> Any:
        if timeout is None:
            pytest.fail("it would wait without end")
        raise GetTimeoutError("…")

    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", fetch)
    with pytest.raises(RunError, match=r"^timed out after 2 s waiting for the answer$"):
        get("ref", 2.0, "the answer")
