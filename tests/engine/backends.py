"""The backends that the conformance suite runs with: how each is built, and what it can be asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tiny_policy import VOCABULARY, tiny_policy

from benchmarks.common.replay import WEIGHT, ReplayedEngine, Script, prompt_key
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.protocol import Engine
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import Completion, Request
from rlhfless_ray.weights.model_folder import without_weights, write_folder

SETTINGS = EngineSettings(max_model_len=320, max_running=32, block_size=32, kv_cache_mb=64, gpu_memory_share=0.5)
LONGEST = 40  # tokens of a response
_versions = itertools.count(1)


@cache
def policy(seed: int) -> dict[str, bytes]:
    """A folder's files, without an end-of-sequence token, so that tests know what ends a response."""
    files = tiny_policy(seed, spread=0.15)
    return {name: content.replace(b'"eos_token_id": 1', b'"eos_token_id": null') for name, content in files.items()}


def arrays(files: dict[str, bytes]) -> dict[str, np.ndarray]:
    from safetensors.torch import load

    return {name: tensor.float().numpy() for name, tensor in load(files["model.safetensors"]).items()}


@dataclass
class Backend:
    """An engine under test.

    Attributes:
        weights: two sets of weights, by name.
        computes: whether it computes a policy. A replayed engine does not, so nobody can check its tokens.
        keeps_kv: whether running requests keep the KV of older weights when the engine takes others.
        processes: the other processes that it needs.
        lost: what it says when it has lost one.
    """

    name: str
    engine: Engine
    weights: dict[str, dict[str, np.ndarray]]
    computes: bool = True
    keeps_kv: bool = False
    processes: list[psutil.Process] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str = "A") -> int:
        """Load weights under a version that no engine had yet."""
        version = next(_versions)
        self.engine.unpark()
        self.engine.load(version, self.weights[name])
        assert self.engine.version == version
        return version

    def model(self, name: str) -> Any:
        """The same policy in transformers."""
        from learner_reference import load

        if name not in self.models:
            self.models[name] = load(policy("AB".index(name)))
        return self.models[name]


def requests(count: int = 8, **changes: Any) -> list[Request]:
    """Requests in pairs with the same prompt. Some prompts fill more than two KV blocks."""
    rng, made = np.random.default_rng(0), []
    for key in range(count):
        if key % 2 == 0:
            size = 75 + key if key % 4 == 0 else 3 + key
            prompt = tuple(rng.integers(2, VOCABULARY, size).tolist())
        made.append(
            Request(**{"key": key, "token_ids": prompt, "seed": 1000 + 7 * key, "max_tokens": LONGEST, "temperature": 1.0, **changes})
        )
    return made


def answer(engine: Engine, asked: list[Request], **options: Any) -> dict[int, Completion]:
    """Return the completions by key."""
    log = TokenLog([Request(**{**vars(one), "key": place}) for place, one in enumerate(asked)])
    for deltas in engine.generate(log.assign(np.arange(len(asked)), 0), **options):
        log.accept(0, "engine", deltas)
    assert not log.missing
    return {one.key: log.completions[place] for place, one in enumerate(asked)}


class Letters:
    """A tokenizer in which each token is a letter."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(200 + token) for token in token_ids)


def word(*token_ids: int) -> str:
    return Letters().decode(list(token_ids), False)


def exact(folder: Path) -> Backend:
    from rlhfless_ray.engine.vllm_engine import VllmEngine

    engine = VllmEngine(folder, SETTINGS, Letters)
    # vLLM's shutdown of one engine takes down what all engines of a process share
    engine.engine.engine_core._finalizer.detach()
    return Backend("exact", engine, _weights(), keeps_kv=True)


def stock(folder: Path) -> Backend:
    from rlhfless_ray.engine.stock_engine import StockEngine

    lost: list[str] = []
    engine = StockEngine(folder, SETTINGS, 1, Letters, lost.append)
    return Backend("stock", engine, _weights(), processes=engine.processes, lost=lost)


def replayed(folder: Path) -> Backend:
    lengths = {prompt_key(one.token_ids): [LONGEST, 25, 31] for one in requests(32)}
    script = Script(lengths, base_s=1e-3, per_seq_s=1e-4, start_s=0.0, learn_s=0.0)
    weights = {name: {WEIGHT: np.array([number], np.uint8)} for number, name in enumerate("AB")}
    return Backend("replayed", ReplayedEngine(script), weights, computes=False, keeps_kv=True)


def _weights() -> dict[str, dict[str, np.ndarray]]:
    return {name: arrays(policy(seed)) for seed, name in enumerate("AB")}


BUILDERS: dict[str, Callable[[Path], Backend]] = {"exact": exact, "stock": stock, "replayed": replayed}


def build(name: str, scratch: Path) -> Backend:
    return BUILDERS[name](write_folder(scratch / "policy", without_weights(policy(0))))
