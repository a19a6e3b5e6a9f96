"""Requests to a real engine, its answers, and what equal answers are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from safetensors.torch import load as load_tensors
from tiny_policy import in_pairs, tiny_policy

from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import Completion, Request

BLOCK = 32
SETTINGS = EngineSettings(max_model_len=320, max_running=64, block_size=BLOCK, kv_cache_mb=64, gpu_memory_share=0.5)
FILES = {name: tiny_policy(seed, spread=0.15) for seed, name in enumerate("AB")}
TIED = tiny_policy(5, tied=True, spread=0.15)


def weights_of(files: dict[str, bytes]) -> dict[str, np.ndarray]:
    """As the learner publishes them; read-only, as they come out of Ray's object store."""
    arrays = {name: tensor.float().numpy() for name, tensor in load_tensors(files["model.safetensors"]).items()}
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


requests = in_pairs


def at_several_temperatures(asked: list[Request]) -> list[Request]:
    return [replace(one, temperature=(0.0, 0.5, 1.0)[one.key % 3]) for one in asked]


VERSIONS = itertools.count(1)  # a version names one set of weights, for every engine


def put(engine: Any, weights: dict[str, np.ndarray]) -> int:
    engine.load(next(VERSIONS), weights)
    return engine.version


def answer(engine: Any, asked: list[Request], **options: Any) -> dict[int, Completion]:
    """Return the completions by the keys of the requests, which need not count from 0."""
    token_log = TokenLog([replace(one, key=key) for key, one in enumerate(asked)])
    for progress in engine.generate(token_log.assign(np.arange(len(asked)), 0), **options):
        token_log.accept(0, "engine", progress)
    assert not token_log.missing
    return {one.key: replace(token_log.completions[key], key=one.key) for key, one in enumerate(asked)}


def assert_same(found: dict[int, Completion], wanted: dict[int, Completion]) -> None:
    assert found.keys() == wanted.keys()
    for key, one in wanted.items():
        np.testing.assert_array_equal(found[key].token_ids, one.token_ids)
        np.testing.assert_allclose(found[key].logprobs, one.logprobs, atol=1e-4)
        assert found[key].finish_reason == one.finish_reason
