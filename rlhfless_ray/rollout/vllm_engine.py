"""One vLLM engine in this process. Only this module, those that it loads and the KV connector import vLLM."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash

from rlhfless_ray.common.errors import one_line_with_type
from rlhfless_ray.local.fast_imports import fast_imports
from rlhfless_ray.local.process_memory import release_free_heap, release_pages, reserved_outside_mb
from rlhfless_ray.prefix.block_hash import root, salt
from rlhfless_ray.prefix.block_hasher import BlockHasher
from rlhfless_ray.prefix.pages import PageStore
from rlhfless_ray.rollout.control_queue import ControlQueue, DraftNews, EngineCommand
from rlhfless_ray.rollout.engine_settings import EngineSettings
from rlhfless_ray.rollout.running_requests import RunningRequests
from rlhfless_ray.rollout.stop_strings import StopStrings
from rlhfless_ray.rollout.token_deltas import ENDS, TokenDeltas
from rlhfless_ray.types import EngineStep, Request, Span
from rlhfless_ray.weights.compare import differing
from rlhfless_ray.weights.model_folder import content_addressed_folder, stored_weights, write_folder
from rlhfless_ray.weights.tensor_file import Files, as_numpy, as_tensor

if TYPE_CHECKING:
    from rlhfless_ray.rollout.drafts import Drafter
    from rlhfless_ray.rollout.keyed_sampler import KeyedSampler

# vLLM reads these when it is imported: engine and worker in this process, no telemetry, errors only.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
# Overrides the environment, because `KeyedSampler` takes the place of the samplers in vLLM's first model runner. With Triton and a
# device, the second one is the default, and it has others.
REQUIRED = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# The engine is eager on CPU. This keeps functions that vLLM decorates from loading the compiler.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
# On GPU, attention in float32 uses Triton (FlashAttention has no float32). Its products default to TF32, with 10 bits of fraction,
# while the learner's have 23.
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
# Not imported on CPU, because only audio and object detection need it. Packages that come with vLLM for GPUs may need it too.
OPTIONAL = ("scipy",)
LARGE_BYTES = 100e6  # of weights; from here on memory that a load leaves on the heap is worth the milliseconds to release it
COMPILER = ("torch._inductor.lowering",)  # vLLM patches it if it can be imported, which takes half a second
_registered: set[str] = set()  # architectures that `prepare` has seen in this process


def prepare(on_cpu: bool = True, architectures: Sequence[str] = ()) -> None:
    """Import everything that an engine for these models needs. This is the slow part of a start, and needs no lease or device.

    The models' classes are registered with vLLM as loaded. Otherwise vLLM would inspect each class in another Python process, so
    that its import cannot touch a device before a fork. This process does not fork.
    """
    set_environment(on_cpu)
    if "vllm.v1.engine.llm_engine" in sys.modules and _registered.issuperset(architectures):
        return
    with fast_imports((*OPTIONAL, *COMPILER) if on_cpu else ()):
        from vllm import EngineArgs, LLMEngine, ModelRegistry  # noqa: F401

        import rlhfless_ray.rollout.keyed_sampler  # noqa: F401

        import_module("vllm.v1.worker.cpu_worker" if on_cpu else "vllm.v1.worker.gpu_worker")
        for name in architectures:
            if name in ModelRegistry.models:
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        _registered.update(architectures)


def set_environment(on_cpu: bool) -> None:
    """Set the variables that vLLM reads when it is imported."""
    for name, value in {**ENVIRONMENT, **(EAGER if on_cpu else EXACT)}.items():
        os.environ.setdefault(name, value)
    os.environ.update(REQUIRED)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the recipe's kv_cache_mb


class VllmEngine:
    """A vLLM engine that turns `Request`s into `TokenDeltas`. Weights are loaded as {name: array}, by version.

    It starts without weights (`version` is None). `generate` raises until `load` was called.
    """

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings,
        tokenizer: Callable[[], Any] | None = None,
        load_format: str = "dummy",
        drafter: Path | None = None,
    ) -> None:
        """Build the engine.

        Args:
            folder: contains config.json and perhaps generation_config.json.
            tokenizer: loads the tokenizer, for stop strings.
            load_format: as in vLLM; "auto" loads the folder's weights.
            drafter: folder of a model that drafts.
        """
        on_cpu = settings.device == "cpu"
        prepare(on_cpu, json.loads((folder / "config.json").read_bytes()).get("architectures") or ())
        from vllm import EngineArgs, LLMEngine

        self.version: int | None = None
        self.adapter, self.has_base = settings.adapter, False
        self.adapter_request: Any = None  # vLLM's name of the adapter, for each request
        self.reference_engines: list[VllmEngine] = []  # see `differing`
        self.words = StopStrings(tokenizer)
        self.width = settings.tensor_parallel
        self.pages: PageStore | None = PageStore() if settings.prefix_kv else None
        self.kept: dict[int, dict[bytes, np.ndarray]] = {}  # by ticket: pages of cut requests, by address
        self.steps: list[EngineStep] = []
        self.spans: list[Span] = []  # spans of commands
        self.stop_token_ids = read_stop_tokens(folder)
        self.max_model_len = settings.max_model_len
        memory = (
            {"kv_cache_memory_bytes": settings.kv_cache_mb * 2**20 // self.width}  # of a member
            if on_cpu
            else {"gpu_memory_utilization": settings.gpu_memory_share, "enable_sleep_mode": True}
        )
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                load_format=load_format,
                dtype=settings.dtype,
                skip_tokenizer_init=True,
                trust_remote_code=settings.trust_remote_code,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_running,
                block_size=settings.block_size,
                enable_prefix_caching=True,
                enforce_eager=on_cpu,
                distributed_executor_backend=_executor(self.width),
                tensor_parallel_size=self.width,
                async_scheduling=False,  # the sampler reads each request's output so far, which must be complete
                disable_log_stats=True,
                speculative_config=_speculative_config(settings.speculation),
                kv_transfer_config=_transfer_config(self.pages),
                quantization=_quantization_method(settings.quantization),
                **memory,
                **_adapter_arguments(settings),
            )
        )
        core: Any = self.engine.engine_core.engine_core  # type: ignore[attr-defined]  # of a client in this process
        self.core = core
        self.sampler = install_sampler(core.model_executor.driver_worker)
        self.drafter = _attach_drafter(core.model_executor.driver_worker, settings.speculation, drafter)
        # Otherwise vLLM fills up requests whose prompt is cached with drafts of -1, for CUDA graphs. A step that reads none would fail.
        core.scheduler.num_spec_tokens = 0
        self.live = RunningRequests(self.sampler)
        self.on_cpu = on_cpu
        self._name_blocks()

    def _name_blocks(self) -> None:
        """Name KV blocks by the addresses of their pages, unless the layers form several groups, as in hybrid models."""
        core = self.core
        size = core.vllm_config.cache_config.block_size
        if len(core.scheduler.kv_cache_config.kv_cache_groups) != 1 or getattr(core.scheduler, "hash_block_size", size) != size:
            return
        kept = self.pages if self.pages is not None and self.pages.kind is not None else None
        start = kept.layout.start if kept is not None else partial(root, b"no pages")
        core.request_block_hasher = BlockHasher(start, size, core.request_block_hasher)

    def load(self, version: int, weights: dict[str, np.ndarray], base: Files | None = None) -> None:
        """Replace the weights in place. Raises ValueError if the model has weights that are not among them.

        With `EngineSettings.adapter` the weights are an adapter's, by peft's names, and `base` has the files of the model below it.
        The base is loaded only if the engine lacks it. Later requests have `version` in their cache salt, so they cannot reach cached
        KV of older weights.
        """
        self.version = None
        if self.adapter is None:
            self._replace_weights(version, weights)
        else:
            self._replace_adapter(version, weights, base)
        if self.on_cpu and sum(array.nbytes for array in weights.values()) > LARGE_BYTES:
            release_free_heap()  # memory that packing left free
        self.version = version

    def _replace_weights(self, version: int, weights: dict[str, np.ndarray]) -> None:
        reload: Any = _reload
        if self.width > 1:
            missing_by_member = self.core.model_executor.load(reload, weights, self.on_cpu)
        else:
            missing_by_member = self.engine.collective_rpc(reload, args=(weights, self.on_cpu))
        missing = set().union(*missing_by_member)
        if missing:
            raise ValueError(f"weight version {version} lacks {len(missing)} of the engine's weights, {min(missing)} first")

    def _replace_adapter(self, version: int, weights: dict[str, np.ndarray], base: Files | None) -> None:
        from rlhfless_ray.rollout.adapter_layers import REQUEST, put_adapter

        if not self.has_base:
            if base is None:
                raise ValueError(f"weight version {version} is an adapter, but its base is missing")
            self._replace_weights(version, {name: as_numpy(tensor) for name, tensor in stored_weights(base)})
            self.has_base = True
        put: Any = put_adapter
        if unknown := self.engine.collective_rpc(put, args=(weights, self.adapter))[0]:
            raise ValueError(f"weight version {version} adapts {len(unknown)} layers that the engine lacks, {unknown[0]} first")
        self.adapter_request = REQUEST

    def differing(self, folder: Path, settings: EngineSettings, weights: dict[str, np.ndarray]) -> list[str]:
        """Return the names of the tensors in which this engine differs from one that loads the folder, which has these weights.

        On CPU a new engine loads the folder with vLLM's own loader. A device has no room for two, and members belong to one engine,
        so there this engine reloads.
        """
        fingerprint, fused_modules = cast(Any, _fingerprint), cast(Any, _fused_modules)
        fingerprints = self.engine.collective_rpc(fingerprint)
        if self.on_cpu and self.width == 1:
            # kept, because an engine that ends destroys state shared by all engines of a process
            self.reference_engines.append(VllmEngine(folder, replace(settings, prefix_kv=False, kv_cache_mb=16), load_format="auto"))
            other = self.reference_engines[-1].engine
        else:
            other = self.engine
            self._replace_weights(0, weights)
            self.version = None
        wanted = other.collective_rpc(fingerprint)
        fused = self.engine.collective_rpc(fused_modules)[0]
        shapes = {name: array.shape for name, array in weights.items()}
        return sorted({name for own, new in zip(fingerprints, wanted, strict=True) for name in differing(own, new, shapes, fused)})

    def generate(
        self, requests: Iterable[Request], interval_s: float = float("inf"), control_queue: ControlQueue | None = None
    ) -> Iterator[TokenDeltas]:
        """Yield new tokens about every `interval_s` seconds until every request has ended or been cut.

        Commands of `control_queue` are carried out between two steps. The tokens of a cut request, the first token of an added
        request and the end of an `awaited` one are yielded at once. Raises RuntimeError without weights, for a key that is running
        already, and if tokens and log-probabilities do not match.
        """
        if self.version is None:
            raise RuntimeError("this engine has no weights yet: load a version first")
        self._add(requests)
        fresh: set[int] = set()  # added by a command, without a token yet
        last = time.perf_counter()
        try:
            while True:
                for command in control_queue.take() if control_queue else ():
                    fresh |= self._carry_out(command)
                    if command.cut:
                        yield self._take_deltas(self.version)
                if not self.live:
                    if control_queue is None or control_queue.close_if_empty():
                        return
                    continue
                start = time.perf_counter()
                if self.drafter is not None:
                    self.drafter.begin_step(self.sampler.running, self.sampler.context_tokens)
                self.sampler.reset_counts()
                outputs = self._step()
                now = time.perf_counter()
                self._record_step(now - start)
                has_awaited = self._record_ends(outputs)
                begun = self.live.find_begun(fresh)
                if begun or has_awaited or not self.live.decoding or now - last >= interval_s:
                    fresh -= begun
                    yield self._take_deltas(self.version)
                    last = now
        finally:  # also if the caller stops iterating
            self.engine.abort_request([str(number) for number in self.live.rows])
            self.live.forget(self.live.rows)
            self.sampler.take()
            if self.pages is not None:
                self.pages.computed.clear()
                self.pages.copied.clear()

    def _record_step(self, seconds: float) -> None:
        drawn = self.sampler
        drafted, accepted = (sum(counts) for counts in zip(*drawn.tried.values(), strict=True)) if drawn.tried else (0, 0)
        step = EngineStep(drawn.running, drawn.new_tokens, drawn.context_tokens, seconds, drafted, accepted)
        if self.drafter is not None:
            step = replace(step, draft_s=self.drafter.draft_s, by_model=self.drafter.count_by_model(drawn.tried))
            self.drafter.observe_step(step, drawn.tried)
        self.steps.append(step)

    def _step(self) -> list[Any]:
        try:
            return self.engine.step()
        except Exception as error:
            import vllm

            names = ", ".join(self.engine.model_config.architectures)
            where = "CPU" if self.on_cpu else "this GPU"
            raise RuntimeError(f"vLLM {vllm.__version__} cannot compute {names} on {where} ({one_line_with_type(error, 300)})") from error

    def _take_deltas(self, version: int) -> TokenDeltas:
        deltas = self.live.take_deltas(version)
        if self.drafter is not None:
            deltas = replace(deltas, observed=self.drafter.learned.acceptance.take_news())
        if self.pages is None or not self.pages.computed:
            return deltas
        begun = zip(deltas.keys.tolist(), deltas.counts.tolist(), strict=True)
        known = {key: self.pages.computed.pop(str(key), None) for key, count in begun if count}
        return replace(deltas, computed={key: tokens for key, tokens in known.items() if tokens is not None})

    def _carry_out(self, command: EngineCommand) -> set[int]:
        """Carry out a command, and return the numbers of the added requests. Cuts of requests that have ended are ignored."""
        begin, names = time.time(), [str(key) for key in command.cut]
        keep = self.pages is not None and not self.pages.refused and command.ticket
        if self.pages is not None and keep:
            self.pages.request_save(names)
        self.engine.abort_request([str(number) for number in self.live.cut(command.cut)])
        if self.pages is not None and keep:
            self.kept[command.ticket] = self.pages.take_saved(names)
        if command.copy and self.pages is not None:
            self.kept[command.ticket] = self._copy_pages(command.copy)
        added = self._add(command.add)
        self.update_drafts(command.drafts)
        if command.what:
            self.spans.append(Span("transfer", command.what, begin, time.time()))
        return added

    def _copy_pages(self, keys: Sequence[int]) -> dict[bytes, np.ndarray]:
        """Return {address: page} of the full KV blocks of running requests, which go on."""
        scheduler, numbers = self.core.scheduler, {self.live.number.get(key) for key in keys}
        pages: dict[bytes, np.ndarray] = {}
        for name, request in scheduler.requests.items():  # by vLLM's own names
            if request.sampling_params.extra_args["key"] in numbers:
                pages.update(scheduler.connector.copy(request, scheduler.kv_cache_manager.get_block_ids(name)[0]))
        return pages

    def update_drafts(self, drafts: DraftNews | None) -> None:
        """Update the drafter with data of other engines."""
        if drafts is not None and self.drafter is not None:
            self.drafter.update(drafts)

    def _add(self, requests: Iterable[Request]) -> set[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        added = set()
        for request in requests:
            number, before = self.live.add(request), len(request.generated)
            extra: dict[str, Any] = {
                "key": number,
                "seed": request.seed,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "offset": before,
            }
            ends = [*self.stop_token_ids, *request.stop_token_ids]
            if before < request.min_tokens:
                extra |= {"min_tokens": request.min_tokens, "ends": ends}
            if self.pages is not None:
                extra["name"] = str(request.key)  # by which the connector finds its pages
            params = SamplingParams(
                temperature=0.0,  # greedy: vLLM takes the token that the sampler drew
                max_tokens=request.max_tokens - before,
                stop_token_ids=ends,
                ignore_eos=True,  # stop_token_ids holds the end-of-sequence tokens already
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,  # earlier tokens are read from the sampler, at no cost per step
                skip_clone=True,  # these parameters are not shared
                extra_args=extra,
            )
            tokens = [*request.token_ids, *request.generated]
            # the form that vLLM's renderer returns, which would process every prompt again
            prompt: Any = {"type": "token", "prompt_token_ids": tokens, "cache_salt": salt(self.version or 0)}
            self.engine.add_request(str(number), prompt, params, lora_request=self.adapter_request)
            added.add(number)
        return added

    def _record_ends(self, outputs: list[Any]) -> bool:
        """Record the requests that ended in a step, and return whether one of them is awaited."""
        ended = {int(output.request_id): output.outputs[0] for output in outputs if output.finished}
        awaited = self._end_at_stop_words({number: len(answer.token_ids) for number, answer in ended.items()})
        for number, answer in ended.items():
            if number not in self.live.rows or self.live.rows[number].ended is not None:
                continue
            if answer.finish_reason not in ENDS[1:3]:
                raise RuntimeError(f"vLLM ended request {self.live.rows[number].request.key} as {answer.finish_reason!r}")
            self.live.end(number, answer.token_ids, ENDS.index(answer.finish_reason))
            if self.drafter is not None:
                self.drafter.finish(number, answer.token_ids)
            awaited |= self.live.rows[number].request.awaited
        return awaited

    def _end_at_stop_words(self, lengths: dict[int, int]) -> bool:
        """End the requests that have generated a stop word, and return whether one of them is awaited.

        `lengths`: {request: tokens} of the requests that vLLM has ended. Tokens after a response's end, which a step with drafts may have
        drawn, do not count. Call this before vLLM's ends are recorded, so that a stop word in the last token counts as "stop" instead of
        "length".
        """
        ended = []
        for number, row in self.live.rows.items():
            if row.request.stop and row.ended is None:
                tokens = self.sampler.outputs.get(number, [])
                length = lengths.get(number, len(tokens))
                for count in range(row.searched + 1, length + 1):
                    response = tokens if count == len(tokens) else tokens[:count]  # without drafts a step copies no response
                    if self.words.found(response, row.request.stop, row.request.generated, row.request.min_tokens):
                        self.live.end(number, response, ENDS.index("stop"))
                        ended.append(number)
                        break
                row.searched = length
        self.engine.abort_request([str(number) for number in ended])
        return any(self.live.rows[number].request.awaited for number in ended)

    def take_steps(self) -> list[EngineStep]:
        """Return the step records since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def take_spans(self) -> list[Span]:
        """Return the spans of commands since the last call."""
        spans, self.spans = self.spans, []
        return spans

    def park(self) -> None:
        """Release the memory of weights and KV cache while no lease is held. Call `load` before any other work.

        Raises RuntimeError while requests are running.
        """
        if self.on_cpu and not self.engine.reset_prefix_cache():  # cached prefixes would point to released memory
            raise RuntimeError("this engine has running requests, so it cannot release their KV cache")
        self.version, self.has_base = None, False
        if self.on_cpu:  # where vLLM ignores sleep
            drop: Any = _drop_memory
            self.engine.collective_rpc(drop)
        else:
            self.engine.sleep(level=2)

    def unpark(self) -> None:
        if not self.on_cpu:
            self.engine.wake_up()

    def kept_on_device_mb(self) -> float:
        """Return the device memory of a parked engine in MB.

        vLLM frees the memory below its own pools without torch's knowledge. torch still counts it as reserved, which with the KV
        cache is most of the device.
        """
        if self.on_cpu:
            return 0.0
        import torch
        from vllm.device_allocator.cumem import CuMemAllocator

        return reserved_outside_mb(torch.cuda.memory_snapshot(), find_sleeping_pools(CuMemAllocator.get_instance()))


def find_sleeping_pools(allocator: Any) -> set[tuple[int, int]]:
    """Return the ids of the memory pools that vLLM puts to sleep: one per purpose, in later versions several."""
    pools = [entry if isinstance(entry, list) else [entry] for entry in allocator.allocator_and_pools.values()]
    return {tuple(pool.id) for entries in pools for pool, _ in entries}


def model_folder(scratch: Path, files: Files, settings: EngineSettings) -> Path:
    """Write config and tokenizer to a folder for an engine: in `scratch` on CPU, in vLLM's cache on GPU.

    On GPU vLLM caches the compiled model under a name that contains the folder's path. With another path each engine would compile
    again, which is most of its start.
    """
    if settings.device != "cpu":
        from vllm.envs import VLLM_CACHE_ROOT

        with suppress(OSError):  # the cache cannot be written: compile
            return content_addressed_folder(Path(VLLM_CACHE_ROOT) / "rlhfless", files)
    return write_folder(scratch, files)


def _quantization_method(kind: str) -> str | None:
    """Return vLLM's name of a quantisation that is applied to the weights when they are loaded."""
    if kind == "int8":
        from rlhfless_ray.rollout.int8_linear import METHOD

        return METHOD
    return "fp8_per_channel" if kind == "fp8" else None


def _adapter_arguments(settings: EngineSettings) -> dict[str, Any]:
    if settings.adapter is None:
        return {}
    from rlhfless_ray.rollout.adapter_layers import engine_arguments

    return engine_arguments(settings)


def _executor(width: int) -> Any:
    """Return vLLM's `distributed_executor_backend` for an engine with `width` members."""
    if width == 1:
        return "uni"
    from rlhfless_ray.rollout.member_executor import MemberExecutor

    return MemberExecutor


def _transfer_config(pages: PageStore | None) -> Any:
    if pages is None:
        return None
    from rlhfless_ray.prefix.connector import transfer_config

    return transfer_config(pages)


def install_sampler(worker: Any) -> KeyedSampler:
    """Replace vLLM's samplers in this worker."""
    from rlhfless_ray.rollout.keyed_sampler import KeyedSampler

    runner = worker.model_runner
    sampler = KeyedSampler(runner)
    runner.sampler, runner.rejection_sampler = sampler, sampler.verify
    return sampler


def _speculative_config(kind: str) -> dict[str, Any] | None:
    if kind == "off":
        return None
    from rlhfless_ray.rollout.drafts import MOST_TOKENS, Drafter

    return {"method": "custom_class", "model": f"{Drafter.__module__}.{Drafter.__qualname__}", "num_speculative_tokens": MOST_TOKENS}


def _attach_drafter(worker: Any, kind: str, model: Path | None) -> Drafter | None:
    """Complete the drafter that vLLM has built in this worker."""
    if kind == "off":
        return None
    drafter: Drafter = worker.model_runner.drafter
    drafter.attach(worker.model_runner, kind == "on", model)
    return drafter


def _reload(worker: Any, weights: dict[str, np.ndarray], on_cpu: bool) -> set[str]:
    """Run in vLLM's worker: load the weights, and return the names of parameters that got none."""
    model = worker.get_model()
    once, every = ({name for name, _ in model.named_parameters(remove_duplicate=which)} for which in (True, False))
    missing: set[str] = set()
    load = model.load_weights

    def load_and_record(named: Any) -> Any:
        # Only during a load does the model have exactly the weights of a file. Later vLLM computes others from them, such as latent
        # attention's W_UK_T, and may drop those that it has packed. Tied weights are then apart.
        names = {name for name, _ in model.named_parameters()} - (every - once)
        missing.update(name.replace(".base_layer.", ".") for name in names)
        loaded = load(named)
        missing.difference_update(missing if loaded is None else loaded)  # vLLM itself only warns
        return loaded

    model.load_weights = load_and_record
    if on_cpu:
        _forget_packed_experts(model)
    try:
        named = ((name, as_tensor(np.asarray(array))) for name, array in weights.items())
        worker.reload_weights(weights_iterator=named)
    finally:
        del model.load_weights
    if on_cpu:  # a head tied to the embeddings has its own packed copy, which a reload does not update
        seen = set()
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and id(weight) in seen:
                module.quant_method.process_weights_after_loading(module)
            seen.add(id(weight))
        _drop_packed_embeddings(model)
    return missing


def _drop_packed_embeddings(model: Any) -> None:
    """Release the packed copy that vLLM (0.32) makes of embeddings. It is not used if the model has a separate output head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(model.modules())
    if any(isinstance(module, ParallelLMHead) for module in modules):
        for module in modules:
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.cpu_linear = _only_embeds


def _forget_packed_experts(model: Any) -> None:
    """Make vLLM (0.32) pack fused experts for its CPU kernels again on a reload.

    It packs them only when it builds the kernel. Otherwise a reload would leave plain weights where the kernel reads packed ones, which
    silently gives wrong results.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _fingerprint(worker: Any) -> dict[str, np.ndarray]:
    """Run in vLLM's worker: return a hash of each row (or expert) of the model's parameters, by name.

    For linear layers whose packed weights cannot be read, the outputs for fixed inputs take their place.
    """
    import torch

    hashes = {}
    with torch.no_grad():
        model = worker.get_model()
        for name, parameter in model.named_parameters():
            if parameter.numel():
                rows = parameter.detach().reshape(len(parameter) if parameter.dim() > 1 else 1, -1).cpu().contiguous()
                hashes[name] = np.array([xxhash.xxh3_64_intdigest(row) for row in rows.view(torch.uint8).numpy()], np.uint64)
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and not weight.numel():
                width = getattr(module, "input_size_per_partition", None) or module.input_size  # replicated layers have only the latter
                inputs = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
                hashes[f"{name}.weight"] = module.cpu_linear(inputs.to(weight.dtype), weight, None).float().T.numpy()
    return hashes


def _fused_modules(worker: Any) -> dict[str, list[str]]:
    """Run in vLLM's worker: return the model's {fused module: its parts}."""
    return dict(getattr(worker.get_model(), "packed_modules_mapping", None) or {})


def _drop_memory(worker: Any) -> None:
    """Run in vLLM's worker on CPU: release the memory of the KV cache and of the weights, which a reload allocates again.

    Addresses of tensors stay valid; their content becomes zero. Kernels of linear layers are deleted with their packed weights.
    """
    model = worker.get_model()
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = _without_weights
    tensors = [*worker.model_runner.kv_caches, *model.parameters()]
    for start, size in {(s.data_ptr(), s.nbytes()) for s in (tensor.untyped_storage() for tensor in tensors)}:
        release_pages(start, size)


def _without_weights(*_: Any) -> Any:
    raise RuntimeError("this engine was parked without its weights and has not loaded any since")


def _only_embeds(*_: Any) -> Any:
    raise RuntimeError("these embeddings are also the model's output head, but their packed copy was dropped")


def read_stop_tokens(folder: Path) -> list[int]:
    """Return the end-of-sequence token ids of a model folder, from generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            ids = json.loads(file.read_text()).get("eos_token_id")
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
    return []
