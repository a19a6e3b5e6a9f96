"""Engines are shared: each takes seconds to build. vLLM is imported when the first test needs it, not at collection."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "learn"))  # tiny_policy, learner_reference
sys.path.insert(0, str(Path(__file__).parent))  # asking


@pytest.fixture(scope="session")
def sampling() -> Iterator[ModuleType]:
    """`rlhfless_ray.engine.keyed_sampler`; the variables that vLLM wants are taken back afterwards."""
    import torch

    before, threads = dict(os.environ), torch.get_num_threads()
    from rlhfless_ray.engine import prepare_vllm

    prepare_vllm.prepare()
    torch.set_num_threads(1)
    from rlhfless_ray.engine import keyed_sampler as sampling

    yield sampling
    torch.set_num_threads(threads)
    for name in {**prepare_vllm.ENVIRONMENT, **prepare_vllm.REQUIRED, **prepare_vllm.EAGER}:
        if name not in before:
            os.environ.pop(name, None)


@pytest.fixture(scope="session")
def new_engine(sampling: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """An engine for a policy's files, without weights."""
    from asking import SETTINGS

    from rlhfless_ray.engine.vllm_engine import VllmEngine
    from rlhfless_ray.weights.model_folder import without_weights, write_folder

    def build(files: dict[str, bytes], drafter: dict[str, bytes] | None = None, **changes: Any) -> Any:
        folder = write_folder(tmp_path_factory.mktemp("engine"), without_weights(files))
        draft_folder = write_folder(tmp_path_factory.mktemp("drafter"), drafter) if drafter else None
        made = VllmEngine(folder, replace(SETTINGS, **changes), drafter=draft_folder)
        # vLLM's shutdown of one engine takes down what all engines of a process share, and 1 s of garbage collection at the end
        made.engine.engine_core._finalizer.detach()
        kept.append(made)
        return made

    kept: list[Any] = []
    return build
