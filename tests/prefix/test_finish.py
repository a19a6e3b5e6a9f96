"""The end of a step's prefix KV, if an engine has not used its pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, RayTaskError

from placement.scaling.prefix_benefit import PrefixChoice
from rlhfless_ray.prefix import prefix_stage
from rlhfless_ray.prefix.prefix_stage import PrefixStage
from rlhfless_ray.step.step_prefixes import StepPrefixes


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RayTaskError("fetch_pages", "a traceback", KeyError("row")), ["prefix KV: rollout-1 could not use its pages: 'row'"]),
        (ObjectLostError("00", "", ""), []),
    ],
)
def test_the_reason_is_logged_if_an_engine_could_not_use_its_pages(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: list[str]
) -> None:
    """Unless it was lost, which its rollout reports."""

    def get(ref: Any, seconds: float, what: str) -> Any:
        raise error

    monkeypatch.setattr(prefix_stage, "get", get)
    messages: list[str] = []
    stage = PrefixStage.__new__(PrefixStage)
    stage.context = SimpleNamespace(record=SimpleNamespace(progress=SimpleNamespace(message=messages.append)))  # type: ignore[assignment]
    actor = SimpleNamespace(drop_pages=SimpleNamespace(remote=lambda: "dropped"))
    step = StepPrefixes(PrefixChoice(True, 1, "on"), sent=[(SimpleNamespace(id="rollout-1", actor=actor), "fetched")])  # type: ignore[list-item]
    stage.finish(step)
    assert messages == expected and step.sent == []
