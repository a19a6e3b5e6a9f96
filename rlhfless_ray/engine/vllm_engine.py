"""One vLLM engine in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlhfless_ray.common.errors import one_line_with_type
from rlhfless_ray.engine.control_queue import DraftNews, EngineCommand
from rlhfless_ray.engine.engine_arguments import engine_arguments
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.prepare_vllm import image_prompts, install_sampler, prepare, use_fast_products
from rlhfless_ray.engine.stepped_engine import SteppedEngine, check_weights_used
from rlhfless_ray.engine.token_deltas import CUT, TokenDeltas
from rlhfless_ray.engine.worker_weights import (
    check_weights,
    drop_memory,
    fingerprint,
    fused_modules,
    reload_weights,
    restore_unregistered,
    save_unregistered,
)
from rlhfless_ray.local.member_process import members_memory_mb
from rlhfless_ray.local.process_memory import own_memory_mb, release_free_heap, reserved_outside_mb
from rlhfless_ray.prefix.block_hash import root, salt
from rlhfless_ray.prefix.block_hasher import BlockHasher
from rlhfless_ray.prefix.pages import PageStore
from rlhfless_ray.types import EngineStep, Request
from rlhfless_ray.weights.channel import PublishedVersion, WeightChannel
from rlhfless_ray.weights.compare import differing

if TYPE_CHECKING:
    from rlhfless_ray.engine.drafts import Drafter
    from rlhfless_ray.engine.router_choices import RouterChoices

LARGE_BYTES = 100e6  # of weights; from here on memory that a load leaves on the heap is worth the milliseconds to release it


class VllmEngine(SteppedEngine):
    """The exact engine: vLLM in this process with keyed sampling. Implements `Engine`."""

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
        self.on_cpu = on_cpu = settings.device == "cpu"
        config = json.loads((folder / "config.json").read_bytes())
        architectures = config.get("architectures") or ()
        prepare(on_cpu, architectures)
        use_fast_products(settings.dtype, on_cpu)
        from vllm import LLMEngine

        self.adapter, self.has_base = settings.adapter, False
        self.adapter_request: Any = None  # vLLM's name of the adapter, for each request
        self.reference_engines: list[VllmEngine] = []  # see `differing`
        self.width = settings.tensor_parallel
        self.pages: PageStore | None = PageStore() if settings.prefix_kv else None
        self.kept_pages: dict[int, dict[bytes, np.ndarray]] = {}  # by ticket: pages of cut requests, by address
        # Other processes stretch the time of a step on the clock. This thread's time does not tell how long a device or members work.
        self.work_clock = time.thread_time if on_cpu and self.width == 1 else time.perf_counter
        self.max_model_len = settings.max_model_len
        self.image_prompt = image_prompts(config, folder)
        with self._naming(architectures, "build"):
            self.engine = LLMEngine.from_engine_args(engine_arguments(folder, settings, self.pages, load_format, drafter))
        client: Any = self.engine.engine_core  # in this process
        client._finalizer.atexit = not on_cpu  # it looks for garbage among all that is imported, a CPU second before the process ends
        self.core = core = client.engine_core
        self.sampler = install_sampler(core.model_executor.driver_worker)
        self.drafter = _attach_drafter(core, settings.speculation, drafter)
        self.choices: RouterChoices | None = core.model_executor.driver_worker.choices if settings.records_experts else None
        self.experts: dict[int, np.ndarray] = {}  # by key: what routers chose in responses whose end was not reported yet
        # Otherwise vLLM fills up requests whose prompt is cached with drafts of -1, for CUDA graphs. A step that reads none would fail.
        core.scheduler.num_spec_tokens = 0
        core.check_for_draft_tokens = False  # a call of all members after each step: the drafter gives its drafts to the scheduler itself
        super().__init__(folder, settings, tokenizer, self.sampler)
        if self.width > 1 and self.pages is not None and self.pages.kind is not None:
            from rlhfless_ray.prefix.connector import join_parts

            join_parts(self.pages, self._call_workers)
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

    def check(self, channel: WeightChannel, version: int) -> None:
        """Let the members check all that was published. Raises WeightsDamaged before the engine's weights change."""
        self._call_workers(check_weights, channel, version)

    def load(self, version: int, weights: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None = None) -> None:
        """Replace the weights in place. Raises ValueError if the model has weights that are not among them.

        With `EngineSettings.adapter` the weights are an adapter's, by peft's names, and `base` has the weights of the model below it.
        The base is loaded only if the engine lacks it. Later requests have `version` in their cache salt, so they cannot reach cached
        KV of older weights.
        """
        self.version = None
        if self.adapter is None:
            self._replace_weights(version, weights)
        else:
            self._replace_adapter(version, weights, base)
        size = weights.nbytes if isinstance(weights, PublishedVersion) else sum(array.nbytes for array in weights.values())
        if self.on_cpu and size > LARGE_BYTES:
            release_free_heap()  # memory that packing left free
        self.version = version

    def _replace_weights(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        by_member = self._call_workers(reload_weights, weights, self.on_cpu)
        missing, unused = (set().union(*found) for found in zip(*by_member, strict=True))
        check_weights_used(version, missing, unused)

    def _call_workers(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Return what `function(worker, *args)` returns in every member's vLLM worker."""
        return self.engine.collective_rpc(cast(Any, function), args=args)

    def _replace_adapter(self, version: int, weights: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None) -> None:
        from rlhfless_ray.engine.adapter_layers import REQUEST, put_adapter

        if not self.has_base:
            if base is None:
                raise ValueError(f"weight version {version} is an adapter, but its base is missing")
            self._replace_weights(version, base)
            self.has_base = True
        if unknown := self._call_workers(put_adapter, weights, self.adapter)[0]:
            raise ValueError(f"weight version {version} adapts {len(unknown)} layers that the engine lacks, {unknown[0]} first")
        self.adapter_request = REQUEST

    def differing(self, folder: Path, settings: EngineSettings, weights: dict[str, np.ndarray]) -> list[str]:
        """Return the names of the tensors in which this engine differs from one that loads the folder, which has these weights.

        On CPU a new engine loads the folder with vLLM's own loader. A device has no room for two, and members belong to one engine,
        so there this engine reloads.
        """
        fingerprints = self._call_workers(fingerprint)
        if self.on_cpu and self.width == 1:
            # kept, because an engine that ends destroys state shared by all engines of a process
            self.reference_engines.append(VllmEngine(folder, replace(settings, prefix_kv=False, kv_cache_mb=16), load_format="auto"))
            other = self.reference_engines[-1]
        else:
            other = self
            self._replace_weights(0, weights)
            self.version = None
        wanted = other._call_workers(fingerprint)
        fused = self._call_workers(fused_modules)[0]
        shapes = {name: array.shape for name, array in weights.items()}
        return sorted({name for own, new in zip(fingerprints, wanted, strict=True) for name in differing(own, new, shapes, fused)})

    def _record_step(self, seconds: float, work_s: float) -> None:
        drawn, drafter = self.sampler, self.drafter
        counts = drawn.running, drawn.new_tokens, drawn.context_tokens
        if drafter is None or drafter.is_idle:
            self.steps.append(EngineStep(*counts, seconds, work_s=work_s))
            return
        drafted, accepted = (sum(counts) for counts in zip(*drawn.tried.values(), strict=True)) if drawn.tried else (0, 0)
        by_model = drafter.count_by_model(drawn.tried)
        self.steps.append(EngineStep(*counts, seconds, drafted, accepted, drafter.draft_s, by_model, work_s))
        drafter.observe_step(self.steps[-1], drawn.tried)

    def _step(self) -> bool:
        start, work_start = time.perf_counter(), self.work_clock()
        self.sampler.reset_counts()
        with self._naming(self.engine.model_config.architectures, "compute"):
            outputs = self.engine.step()
        work_s = self.work_clock() - work_start
        if self.drafter is not None:
            self.drafter.look_up()
        self._record_step(time.perf_counter() - start, work_s)
        return self._record_ends(outputs)

    def _abort(self, numbers: Iterable[int]) -> None:
        self.engine.abort_request([str(number) for number in numbers])

    def _forget(self) -> None:
        super()._forget()
        self.experts.clear()
        if self.drafter is not None:
            self.drafter.values.forget()
        if self.pages is not None:
            self.pages.computed.clear()
            self.pages.copied.clear()

    @contextmanager
    def _naming(self, architectures: Sequence[str], action: str) -> Iterator[None]:
        """Raise what vLLM raises as a RuntimeError that names the model. vLLM's own may not be picklable."""
        try:
            yield
        except Exception as error:
            import vllm

            where = "CPU" if self.on_cpu else "this GPU"
            raise RuntimeError(
                f"vLLM {vllm.__version__} cannot {action} {', '.join(architectures)} on {where} ({one_line_with_type(error, 300)})"
            ) from error

    def _take_deltas(self, version: int) -> TokenDeltas:
        deltas = self.live.take_deltas(version)
        if self.drafter is not None:
            deltas = replace(deltas, observed=self.drafter.learned.acceptance.take_news())
        if self.choices is not None:
            deltas, self.experts = replace(deltas, experts=self.experts), {}
        if self.pages is None or not self.pages.computed:
            return deltas
        begun = zip(deltas.keys.tolist(), deltas.counts.tolist(), strict=True)
        known = {key: self.pages.computed.pop(str(key), None) for key, count in begun if count}
        return replace(deltas, computed={key: tokens for key, tokens in known.items() if tokens is not None})

    def _carry_out(self, command: EngineCommand) -> set[int]:
        added = super()._carry_out(command)
        self.update_drafts(command.drafts)
        return added

    def _cut(self, command: EngineCommand) -> None:
        """Cut requests, and keep pages of KV cache that the command asks for."""
        names = [str(key) for key in command.cut]
        keep = self.pages is not None and not self.pages.refused and command.ticket
        if self.pages is not None and keep:
            self.pages.request_save(names, after_copy=command.after_copy)
        super()._cut(command)
        if self.pages is not None and keep:
            self.kept_pages.setdefault(command.ticket, {}).update(self.pages.take_saved(names))  # a cut may be sent twice
        if command.copy and self.pages is not None:
            self.kept_pages[command.ticket] = self._copy_pages(command.copy)

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
                "top_k": request.top_k,
                "offset": before,
                "response": request.key,
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
            version = self.version if request.cache_version is None else request.cache_version
            # the form that vLLM's renderer returns, which would process every prompt again
            prompt: Any = {"type": "token", "prompt_token_ids": tokens, "cache_salt": salt(version or 0)}
            if request.pictures:
                prompt = self.image_prompt(tokens, salt(version or 0), request.pictures)
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
            self._end(number, answer.token_ids, answer.finish_reason)
            if self.drafter is not None:
                self.drafter.finish(number, answer.token_ids)
            awaited |= self.live.rows[number].request.awaited
        if self.choices is not None:
            self._record_experts(self.choices)
        return awaited

    def _record_experts(self, choices: RouterChoices) -> None:
        """Keep the experts of the responses that ended in a step. vLLM has not computed their last tokens."""
        for name, known in self.sampler.runner.requests.items():  # with those that ended, until the next step
            row = self.live.rows.get(known.sampling_params.extra_args["key"])
            if row is not None and row.ended is not None and row.ended[1] != CUT:
                request, (response, _) = row.request, row.ended
                self.experts[request.key] = choices.of(name, len(request.token_ids) + len(request.generated) + len(response) - 1)

    def _end_at_stop_words(self, lengths: dict[int, int]) -> bool:
        """End the requests that have generated a stop word, and return whether one of them is awaited.

        `lengths`: {request: tokens} of the requests that vLLM has ended. Call this before vLLM's ends are recorded, so that a stop word in
        the last token counts as "stop" instead of "length".
        """
        ended = []
        for number, row in self.live.rows.items():
            if row.request.stop and row.ended is None:
                tokens = self.sampler.outputs.get(number, [])
                response = self._find_stop_word(number, tokens, lengths.get(number, len(tokens)))
                if response is not None:
                    ended.append(number)
                    if self.drafter is not None:
                        self.drafter.finish(number, response)
        self._abort(ended)
        return any(self.live.rows[number].request.awaited for number in ended)

    def park(self) -> float:
        """Release the memory of weights and KV cache while no lease is held, see `Engine.park`. Call `load` before any other work."""
        if self.on_cpu and not self.engine.reset_prefix_cache():  # cached prefixes would point to released memory
            raise RuntimeError("this engine has running requests, so it cannot release their KV cache")
        self.version, self.has_base = None, False
        if self.on_cpu:  # where vLLM ignores sleep
            self._call_workers(drop_memory)
        else:
            self._call_workers(save_unregistered)
            self.engine.sleep(level=2)
        return self._kept_on_device_mb()

    def unpark(self) -> None:
        if not self.on_cpu:
            self.engine.wake_up()
            self._call_workers(restore_unregistered)

    def memory_mb(self) -> float:
        return own_memory_mb() + members_memory_mb()

    def close(self) -> None:
        """Do nothing: further members end with this process."""

    def _kept_on_device_mb(self) -> float:
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


def _attach_drafter(core: Any, kind: str, model: Path | None) -> Drafter | None:
    """Complete the drafter that vLLM has built in the worker of this process."""
    if kind == "off":
        return None
    runner = core.model_executor.driver_worker.model_runner
    drafter: Drafter = runner.drafter
    drafter.attach(runner, core.scheduler, kind == "on", model)
    return drafter
