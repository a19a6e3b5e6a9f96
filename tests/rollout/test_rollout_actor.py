from __future__ import annotations

from pathlib import Path
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


def test_engines_on_a_device_find_what_was_compiled_for_the_same_files(
    sampling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's name of it has the folder's path in it."""
    import vllm.envs as envs

    from rlhfless_ray.rollout.engine import model_folder

    # once there is an engine in a process, vLLM reads the environment no more
    monkeypatch.setattr(envs, "__getattr__", getattr(envs.__getattr__, "__wrapped__", envs.__getattr__))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    files, gpu, cpu = {"config.json": b"{}"}, {"device": "gpu"}, {"device": "cpu"}
    scratch = [tmp_path / "a", tmp_path / "b"]
    first, again = (model_folder(one, files, gpu) for one in scratch)
    assert first == again and first.is_relative_to(tmp_path / "cache") and (first / "config.json").read_bytes() == b"{}"
    assert [model_folder(one, files, cpu) for one in scratch] == scratch
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    assert model_folder(tmp_path / "c", files, gpu) == tmp_path / "c"
