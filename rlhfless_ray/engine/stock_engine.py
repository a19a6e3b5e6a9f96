"""An engine that is vLLM as it is: its own sampler, scheduler and processes. Tokens go in, and tokens with log-probabilities come out.

Nothing in vLLM is replaced, so other versions of vLLM work too. A cut request continues elsewhere with its tokens as the prompt. Its
next tokens have the same distribution, but they are not those that the first engine would have drawn.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_ray.common.errors import one_line_with_type
from rlhfless_ray.engine.engine_arguments import common_arguments
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.stepped_engine import SteppedEngine, check_weights_used
from rlhfless_ray.local.member_process import call_after_end, exit_as_lost
from rlhfless_ray.local.process_memory import own_memory_mb
from rlhfless_ray.prefix.block_hash import salt
from rlhfless_ray.types import EngineStep, Request
from rlhfless_ray.weights.channel import PublishedVersion
from rlhfless_ray.weights.tensor_file import as_tensor, save_tensors, write_file

NOTICE_S = 1.0  # time for Ray to end this process too, when a run ends and takes all processes with it
SHARED_MEMORY = Path("/dev/shm")  # where a version's files are for vLLM's processes to map, if there is room
# Odd, so that different numbers of tokens give different seeds: vLLM's generator of a request starts again when it continues, and with
# the same seed it would repeat its noise.
SEED_STEP = 0x9E3779B97F4A7C15
# For vLLM's processes. They are spawned because the process that starts them has used OpenMP before.
ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
# On CPU, threads are leased instead of bound to cores. An eager engine would load the compiler with its first step, which took 15 s.
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
# Set for the exact engine, by `prepare_vllm`
UNSET = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE")


class ReceivedTokens:
    """Tokens that vLLM has sent, by number of the request. `RunningRequests` reads them as it reads the exact engine's sampler."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}
        self._numbers: list[int] = []
        self._positions: list[int] = []
        self._logprobs: list[float] = []

    def add(self, number: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        known = self.outputs.setdefault(number, [])
        self._numbers += [number] * len(token_ids)
        self._positions += range(len(known), len(known) + len(token_ids))
        self._logprobs += logprobs
        known += token_ids

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return numbers, positions and log-probabilities of the tokens since the last call."""
        arrays = np.array(self._numbers, np.int64), np.array(self._positions, np.int64), np.array(self._logprobs, np.float32)
        self._numbers, self._positions, self._logprobs = [], [], []
        return arrays

    def forget(self, number: int) -> None:
        self.outputs.pop(number, None)


class StockEngine(SteppedEngine):
    """Implements `Engine`."""

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings,
        threads: int = 1,
        tokenizer: Callable[[], Any] | None = None,
        lost: Callable[[str], None] = exit_as_lost,
    ) -> None:
        """Build the engine.

        Args:
            folder: contains config.json and perhaps generation_config.json.
            threads: of each of vLLM's workers.
            tokenizer: loads the tokenizer, for stop strings.
            lost: called with a sentence when one of vLLM's processes has ended.
        """
        import psutil
        from vllm import EngineArgs, LLMEngine

        self.on_cpu = settings.device == "cpu"
        self.lost, self.closing = lost, False
        self.received = ReceivedTokens()
        super().__init__(folder, settings, tokenizer, self.received)
        self.names: dict[str, int] = {}  # numbers of the requests by vLLM's name
        self.named: dict[int, str] = {}  # the reverse
        self.last_s = 0.0  # when the last step ended, or work began
        arguments = EngineArgs(
            **common_arguments(folder, settings, "dummy"),
            logprobs_mode="processed_logprobs",  # of the distribution that tokens are drawn from
            worker_extension_cls="rlhfless_ray.engine.stock_worker.StockWorker",
            seed=int.from_bytes(os.urandom(4)) >> 1,  # engines must not draw the same noise
        )
        process = psutil.Process()
        before = set(process.children())
        try:
            with _environment(threads, self.on_cpu):
                self.engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=True)
        except Exception as error:
            raise RuntimeError(f"vLLM could not start an engine for {folder.name} ({one_line_with_type(error, 300)})") from error
        self.processes = [child for child in process.children() if child not in before]
        for child in self.processes:
            call_after_end(child.pid, self._end_if_lost)
        self._call("rlhfless_watch", os.getpid())

    def _call(self, method: str, *args: object) -> list[Any]:
        """Call a method of `StockWorker` in each of vLLM's workers."""
        return self.engine.collective_rpc(method, args=args)

    def _end_if_lost(self) -> None:
        """vLLM's synchronous client would wait forever for a process that was killed."""
        time.sleep(NOTICE_S)
        if not self.closing:
            self.lost(f"a process of vLLM has ended that the engine in process {os.getpid()} needs")

    # ---- weights --------------------------------------------------------------------------------------------------

    def load(self, version: int, weights: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None = None) -> None:
        """Replace the weights, see `Engine.load`.

        Running requests are cut and continue under the new version. The tokens of a step that vLLM computes meanwhile
        would have no known version.
        """
        running = [number for number, row in self.live.rows.items() if row.ended is None]
        self._abort(running)
        self.version = None
        with tempfile.TemporaryDirectory(prefix="rlhfless-weights-", dir=_roomy_folder(weights)) as name:
            files = {}
            for i, (tensor, array) in enumerate(weights.items()):
                files[tensor] = f"{i}.safetensors"
                write_file(Path(name) / files[tensor], save_tensors({tensor: as_tensor(np.asarray(array))}))
            found = self._call("rlhfless_load", name, files, self.on_cpu)
        missing, unused = ({name for one in found for name in one[kind]} for kind in (0, 1))
        check_weights_used(version, missing, unused)
        self.version = version
        for number in running:
            self._submit(number)

    def park(self) -> float:
        if self.live or not self.engine.reset_prefix_cache():
            raise RuntimeError("this engine has running requests, so it cannot release their KV cache")
        self.version = None
        self._call("rlhfless_leave", self.on_cpu)
        if not self.on_cpu:
            self.engine.sleep(level=2)
        return 0.0

    def unpark(self) -> None:
        if not self.on_cpu:
            self.engine.wake_up()
            self._call("rlhfless_return")

    # ---- generation -----------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        return self._receive(self.engine.step())

    def _add(self, requests: Iterable[Request]) -> set[int]:
        if not self.live:
            self.last_s = time.perf_counter()
        numbers = [self.live.add(request) for request in requests]
        for number in numbers:
            self._submit(number)
        return set(numbers)

    def _submit(self, number: int) -> None:
        """Give a request to vLLM, with all its tokens so far as the prompt."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        request = self.live.rows[number].request
        generated = [*request.generated, *self.received.outputs.get(number, ())]
        before, samples = len(generated), request.temperature > 0
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p if samples else 1.0,
            top_k=request.top_k if samples else 0,
            seed=(request.seed + SEED_STEP * before) % 2**63 if samples else None,
            max_tokens=request.max_tokens - before,
            min_tokens=max(0, request.min_tokens - before),
            stop_token_ids=[*self.stop_token_ids, *request.stop_token_ids],
            ignore_eos=True,  # stop_token_ids holds the end-of-sequence tokens already
            detokenize=False,
            logprobs=0,  # of the drawn token only
            output_kind=RequestOutputKind.DELTA,
        )
        version = self.version if request.cache_version is None else request.cache_version
        prompt = TokensPrompt(prompt_token_ids=[*request.token_ids, *generated], cache_salt=salt(version or 0))
        self.named[number] = name = f"{number}.{before}"
        self.names[name] = number
        self.engine.add_request(name, prompt, params)

    def _abort(self, numbers: Iterable[int]) -> None:
        """Make vLLM forget these requests. Tokens that it still draws for them are dropped."""
        names = [self.named.pop(number) for number in numbers if number in self.named]
        for name in names:
            del self.names[name]
        if names:
            self.engine.abort_request(names)

    def _receive(self, outputs: Sequence[Any]) -> bool:
        """Take a step's tokens, and return whether an awaited request has ended."""
        awaited, new_tokens, context_tokens, running = False, 0, 0, 0
        for output in outputs:
            number = self.names.get(output.request_id)
            if number is None:  # it was aborted
                continue
            answer, row = output.outputs[0], self.live.rows[number]
            tokens = list(answer.token_ids)
            had = len(self.received.outputs.get(number, ()))
            prompt_tokens = len(row.request.token_ids) + len(row.request.generated)
            running += 1
            new_tokens += len(tokens) if had else prompt_tokens + len(tokens) - 1
            context_tokens += prompt_tokens + had
            logprobs = answer.logprobs or ()
            self.received.add(number, tokens, [known[token].logprob for known, token in zip(logprobs, tokens, strict=True)])
            if output.finished:
                del self.names[self.named.pop(number)]
            if self._has_ended(number, answer.finish_reason if output.finished else None):
                awaited |= row.request.awaited
        now = time.perf_counter()
        if running:
            self.steps.append(EngineStep(running, new_tokens, context_tokens, now - self.last_s, work_s=now - self.last_s))
        self.last_s = now
        return awaited

    def _has_ended(self, number: int, finish_reason: str | None) -> bool:
        """End a request whose new tokens complete a stop word, or that vLLM has finished. Returns whether it has ended."""
        tokens = self.received.outputs[number]
        if self._find_stop_word(number, tokens, len(tokens)) is not None:
            self._abort([number])
            return True
        if finish_reason is not None:
            self._end(number, tokens, finish_reason)
        return finish_reason is not None

    # ---- the engine itself ----------------------------------------------------------------------------------------

    def memory_mb(self) -> float:
        family = {one for child in self.processes if child.is_running() for one in (child, *child.children(recursive=True))}
        return own_memory_mb() + sum(one.memory_full_info().pss for one in family) / 2**20

    def close(self) -> None:
        self.closing = True
        self.engine.engine_core.shutdown()


def _roomy_folder(weights: Mapping[str, np.ndarray]) -> Path | None:
    """Return the folder of files in memory if the weights fit it with as much room again, else None: the system's temporary folder."""
    need = weights.nbytes if isinstance(weights, PublishedVersion) else sum(array.nbytes for array in weights.values())
    with suppress(OSError):
        room = os.statvfs(SHARED_MEMORY)
        if room.f_bavail * room.f_frsize > 2 * need:
            return SHARED_MEMORY
    return None


@contextmanager
def _environment(threads: int, on_cpu: bool) -> Iterator[None]:
    """Set the environment that vLLM's processes inherit."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT | (ON_CPU if on_cpu else {}), OMP_NUM_THREADS=str(threads))
    for name in UNSET:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
