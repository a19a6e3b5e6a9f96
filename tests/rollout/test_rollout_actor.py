from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.weights.version import checksum

pytestmark = pytest.mark.engine


@pytest.fixture
def actor(sampling: ModuleType) -> Any:
    from rlhfless_ray.rollout.actor import RolloutActor

    made = RolloutActor({}, {})
    made.loaded = []
    made.engine = SimpleNamespace(unpark=lambda: None, load=lambda version, weights: made.loaded.append((version, weights)))
    return made


def test_weights_are_checked_before_they_are_used(actor: Any) -> None:
    weights = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
    published = checksum(weights)
    spans = actor.load(4, weights, published)
    assert actor.loaded == [(4, weights)]
    assert [(s.activity, s.what) for s in spans] == [("transfer", "load version 4")]
    weights["a"][3] = np.nextafter(weights["a"][3], 9)
    with pytest.raises(ValueError, match="version 5 arrived damaged"):
        actor.load(5, weights, published)
    assert len(actor.loaded) == 1
