"""One vLLM engine in this process. With the sampler beside it, the only place that imports vLLM."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_ray.types import Completion, EngineStep, Request

# Read by vLLM when it is imported: engine and worker in this process, no telemetry, quiet.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def prepare() -> None:
    """Import vLLM: the slow part of a start that needs neither lease nor device."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the recipe's kv_cache_mb
    import vllm  # noqa: F401


class Engine:
    """A vLLM engine that takes Requests and yields Completions; weights come as {name: array}, by version.

    It starts without weights of its own (`version` is None) and refuses to generate until `load` was called.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """`folder`: config.json and, where there is one, generation_config.json. `settings`: see `engine_settings`."""
        prepare()
        from vllm import EngineArgs, LLMEngine

        from rlhfless_ray.rollout.sampling import KeyedSampler

        self.version: int | None = None
        self.steps: list[EngineStep] = []
        self.stop_token_ids = stop_tokens(folder)
        self.max_model_len = settings["max_model_len"]
        on_cpu = settings["device"] == "cpu"
        memory = {"kv_cache_memory_bytes": settings["kv_cache_mb"] * 2**20} if on_cpu else {
            "gpu_memory_utilization": settings["gpu_memory_share"], "enable_sleep_mode": True
        }
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                load_format="dummy",
                dtype=settings["dtype"],
                skip_tokenizer_init=True,
                trust_remote_code=settings["trust_remote_code"],
                max_model_len=settings["max_model_len"],
                max_num_seqs=settings["max_running"],
                block_size=settings["block_size"],
                enable_prefix_caching=True,
                enforce_eager=on_cpu,
                distributed_executor_backend="uni",
                async_scheduling=False,  # the sampler reads each request's output so far, which must be complete
                disable_log_stats=True,
                logits_processors=[KeyedSampler],
                **memory,
            )
        )
        sampler = KeyedSampler.latest
        assert sampler is not None, "vLLM did not build the sampler"
        self.sampler = sampler
        self.on_cpu = on_cpu

    def load(self, version: int, weights: dict[str, np.ndarray]) -> None:
        """Replace the weights in place. Requests after this carry `version` in their cache salt, so KV of older
        weights is unreachable although it may still lie in the cache.

        Raises ValueError when the model has weights that are not among them.
        """
        reload: Any = _reload
        missing = self.engine.collective_rpc(reload, args=(weights, self.on_cpu))[0]
        if missing:
            self.version = None
            raise ValueError(f"weight version {version} lacks {len(missing)} of the engine's weights, {min(missing)} first")
        self.version = version

    def generate(self, requests: list[Request], interval_s: float = float("inf")) -> Iterator[list[Completion]]:
        """Yield finished completions, at most every `interval_s` seconds, until all requests are answered."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        if self.version is None:
            raise RuntimeError("this engine has no weights yet: load a version first")
        for request in requests:
            params = SamplingParams(
                temperature=0.0,  # the sampler draws; vLLM only takes its pick
                max_tokens=request.max_tokens,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=True,  # stop_token_ids holds the end-of-sequence tokens already
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"key": request.key, "seed": request.seed, "temperature": request.temperature},
            )
            prompt = TokensPrompt(prompt_token_ids=list(request.token_ids), cache_salt=f"version {self.version}")
            self.engine.add_request(str(request.key), prompt, params)
        pending: list[Any] = []
        last = time.perf_counter()
        try:
            while self.engine.has_unfinished_requests():
                start = time.perf_counter()
                self.sampler.count_nothing()
                outputs = self.engine.step()
                now = time.perf_counter()
                drawn = self.sampler
                self.steps.append(EngineStep(drawn.running, drawn.new_tokens, drawn.context_tokens, now - start))
                pending += [output for output in outputs if output.finished]
                if pending and now - last >= interval_s:
                    yield self._completions(pending)
                    pending, last = [], now
            if pending:
                yield self._completions(pending)
        finally:
            if self.engine.has_unfinished_requests():  # the caller stopped listening
                self.engine.abort_request([str(request.key) for request in requests])
                self.sampler.records.clear()

    def _completions(self, outputs: list[Any]) -> list[Completion]:
        lengths = {int(output.request_id): len(output.outputs[0].token_ids) for output in outputs}
        logprobs = self.sampler.take(lengths)
        done = []
        for output in outputs:
            key, answer = int(output.request_id), output.outputs[0]
            if not np.isfinite(logprobs[key]).all():
                raise RuntimeError(f"request {key}: the sampler kept no log-probability for one of its tokens")
            tokens = np.asarray(answer.token_ids, np.int32)
            done.append(Completion(key, tokens, logprobs[key], answer.finish_reason, self.version or 0))
        return done

    def take_steps(self) -> list[EngineStep]:
        """The step records since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def park(self) -> None:
        """Give back device memory while no lease is held, weights and all. vLLM ignores sleep on CPU: there all stays."""
        if not self.on_cpu:
            self.version = None
            self.engine.sleep(level=2)

    def unpark(self) -> None:
        if not self.on_cpu:
            self.engine.wake_up()


def _reload(worker: Any, weights: dict[str, np.ndarray], on_cpu: bool) -> set[str]:
    """Runs in vLLM's worker: load the weights, return the names of the parameters that got none."""
    import torch

    model = worker.get_model()
    missing = {name for name, _ in model.named_parameters()}
    load = model.load_weights

    def remembered(named: Any) -> Any:
        loaded = load(named)
        missing.difference_update(missing if loaded is None else loaded)  # vLLM itself only warns
        return loaded

    model.load_weights = remembered
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # they are copied
            named = [(name, torch.from_numpy(np.asarray(array))) for name, array in weights.items()]
        worker.reload_weights(weights_iterator=named)
    finally:
        del model.load_weights
    if on_cpu:  # a head tied to the embeddings keeps a packed copy of its own, which a reload passes over
        seen = set()
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and id(weight) in seen:
                module.quant_method.process_weights_after_loading(module)
            seen.add(id(weight))
    return missing


def stop_tokens(folder: Path) -> list[int]:
    """End-of-sequence token ids of a model folder, from generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            ids = json.loads(file.read_text()).get("eos_token_id")
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
    return []
