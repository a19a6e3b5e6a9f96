"""Each backend is built once: an engine takes seconds to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "learn"))  # tiny_policy, learner_reference
sys.path.insert(0, str(Path(__file__).parent))  # backends


@pytest.fixture(scope="module", params=os.environ.get("RLHFLESS_BACKENDS", "exact stock replayed").split())
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """An engine without weights. `RLHFLESS_BACKENDS` chooses backends, for another version of vLLM."""
    import torch
    from backends import build

    threads, environment = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(1)
    made = build(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.engine.close()
    torch.set_num_threads(threads)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
