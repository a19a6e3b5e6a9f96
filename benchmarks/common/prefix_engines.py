"""The engines of the prefix benchmark: each in a process of its own with one thread, timed by wall clock and by processor time."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.shared_work import HALF_BILLION, SharedWork
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.exact_actor import ExactEngineActor
from rlhfless_ray.types import Request

VOCABULARY = 128  # tokens of prompts are below it in every policy
LARGE = HALF_BILLION.name
POLICIES = {  # about 0.8 M, 13 M and 494 M parameters
    "quickstart": SharedWork("quickstart", hidden=128, intermediate=512, layers=3, micro_sequences=1, vocabulary=VOCABULARY),
    "medium": SharedWork("medium", hidden=320, intermediate=1280, layers=8, micro_sequences=1, vocabulary=VOCABULARY),
    LARGE: HALF_BILLION,
}


@dataclass(frozen=True)
class Used:
    """What one call took: seconds of the wall, of the processor (all threads), prompt tokens computed; of the seconds those
    spent fetching pages."""

    wall_s: float
    cpu_s: float
    tokens: int
    pages: int = 0
    loaded: int = 0
    fetch_s: float = 0.0
    load_s: float = 0.0

    @property
    def busy(self) -> float:
        """Processor seconds a second of the wall."""
        return self.cpu_s / self.wall_s


class TimedActor(ExactEngineActor):
    """A page actor that says what its work took. It plays the rollout engines of a step one after the other, each with an empty
    cache: engine-seconds add up, and nothing competes for the cores."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.jobs: list[Used] = []

    def answer_first(self, version: int, prompts: list[np.ndarray], keys: list[int], refs: list[Any], within_s: float) -> Used:
        """The first token of a response to each request (prompt number in `keys`): prefill and nothing else."""
        self._use_threads(1)
        self.engine.engine.reset_prefix_cache()
        cached: list[int] = []
        step = self.engine.engine.step
        self.engine.engine.step = lambda: _noted(step(), cached)
        tokens = [tuple(prompt.tolist()) for prompt in prompts]  # as a step's prompts are
        wall, cpu, fetched = time.perf_counter(), time.process_time(), None
        if refs:
            fetched = self.fetch_pages(version, [tokens[k] for k in sorted(set(keys))], refs, within_s)
        before = 0 if self.engine.pages is None else self.engine.pages.counts["loaded"]
        load_s = 0.0 if self.engine.pages is None else self.engine.pages.seconds["load"]
        for _ in self.engine.generate([Request(i, tokens[k], i, 1, 1.0) for i, k in enumerate(keys)]):
            pass
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        del self.engine.engine.step
        self.engine.take_stats()
        computed = sum(len(tokens[k]) for k in keys) - sum(cached)
        if self.engine.pages is None:
            return Used(wall, cpu, computed)
        loaded, load_s = self.engine.pages.counts["loaded"] - before, self.engine.pages.seconds["load"] - load_s
        self.engine.pages.clear()
        return Used(wall, cpu, computed, fetched.pages if fetched else 0, loaded, fetched.seconds if fetched else 0.0, load_s)

    def prefill(self, *arguments: Any) -> tuple[Any, ...]:
        self.engine.engine.reset_prefix_cache()
        wall, cpu = time.perf_counter(), time.process_time()
        told = super().prefill(*arguments)
        self.jobs.append(Used(time.perf_counter() - wall, time.process_time() - cpu, told[0].tokens, told[0].pages))
        return told

    def take_jobs(self) -> list[Used]:
        jobs, self.jobs = self.jobs, []
        return jobs


def _noted(outputs: list[Any], cached: list[int]) -> list[Any]:
    cached += [output.num_cached_tokens for output in outputs if output.finished]
    return outputs


def policy(name: str, longest: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config files and random weights of a policy, for sequences of up to `longest` tokens."""
    from rlhfless_ray.weights.model_folder import read_files, stored_weights, without_weights
    from rlhfless_ray.weights.tensor_file import as_numpy

    with tempfile.TemporaryDirectory() as folder:
        files = read_files(replace(POLICIES[name], context_tokens=longest).write(Path(folder)).policy)
        weights = {key: as_numpy(tensor.clone()) for key, tensor in stored_weights(files)}
    return without_weights(files), weights


def open_engine(
    files: dict[str, Any], weights: Any, digests: dict[str, int], longest: int, block_size: int, prefix_kv: bool, dtype: str
) -> Any:
    """An actor with version 1 of the weights. `weights`: reference to them, as slices."""
    import ray

    settings = EngineSettings(
        max_model_len=longest, dtype=dtype, max_running=256, block_size=block_size,
        kv_cache_mb=1024 if dtype == "float32" else 256, gpu_memory_share=0.5, prefix_kv=prefix_kv,
    )  # fmt: skip
    actor: Any = ray.remote(TimedActor).options(num_cpus=0).remote(files, settings)
    ray.get(actor.open.remote(1), timeout=400)
    ray.get(actor.load.remote(1, weights, digests), timeout=60)
    return actor
