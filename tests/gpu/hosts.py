"""Processes that hold engines and learners on the device, for the tests of this folder. Not collected by pytest.

Each host works through its calls in order, so that several hosts import and build side by side. A host that dies or hangs costs only the
tests that wait for it: the next call starts another.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

ON = os.environ.get("RLHFLESS_GPU_TESTS_ON", "gpu")  # "cpu" runs the same tests without an accelerator, as far as they can
CACHE_BYTES = 64 << 20  # KV cache of an engine: several share the device
MEMORY_SHARE = 0.04  # the least that must be free when an engine is built
OPEN_S = 150.0  # timeout for a host's imports and its first engine or learner
CALL_S = 60.0
END_S = 10.0  # timeout for a host's end


class HostDiedError(RuntimeError):
    """A host ended or took too long. Its log is in the message."""


class Host:
    """A process that calls methods of an object of `kind`, a class of this module."""

    def __init__(self, kind: str, scratch: Path, environment: dict[str, str] | None = None) -> None:
        self.kind, self.log, self.environment = kind, scratch / "log", environment or {}
        scratch.mkdir(parents=True, exist_ok=True)
        self.generation = 0  # processes so far: what an earlier one held is gone
        self.process: Any = None
        self.start()

    def start(self) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(self.kind, theirs, str(self.log), self.environment), daemon=True)
        self.process.start()
        theirs.close()
        self.generation += 1
        self.sent = self.received = 0
        self.results: dict[int, tuple[bool, Any]] = {}
        self.outbox: SimpleQueue[Any] = SimpleQueue()
        Thread(target=post, args=(self.outbox, self.connection), daemon=True).start()

    def send(self, method: str, *arguments: Any) -> tuple[int, int]:
        """Begin a call and return its ticket. Starts the process again if it has ended."""
        if not self.process.is_alive():
            self.start()
        self.outbox.put((method, arguments))
        self.sent += 1
        return self.generation, self.sent

    def take(self, ticket: tuple[int, int], within_s: float = CALL_S) -> Any:
        """Return the result of a call. Raises HostDiedError, and RuntimeError with the host's traceback if the call failed."""
        generation, number = ticket
        end = time.monotonic() + within_s
        while generation == self.generation and number not in self.results:
            try:
                if not self.connection.poll(max(0.0, end - time.monotonic())):
                    self.close()
                    raise HostDiedError(f"no answer within {within_s:.0f} s: {self.said()}")
                self.received += 1
                self.results[self.received] = self.connection.recv()
            except (EOFError, OSError):
                self.close()
                raise HostDiedError(f"the process ended: {self.said()}") from None
        if generation != self.generation:
            raise HostDiedError("the process ended during an earlier call")
        done, result = self.results.pop(number)
        if not done:
            raise RuntimeError(result)
        return result

    def ask(self, method: str, *arguments: Any, within_s: float = CALL_S) -> Any:
        return self.take(self.send(method, *arguments), within_s)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        self.process.kill()
        self.process.join(END_S)


def post(outbox: SimpleQueue[Any], connection: Connection) -> None:
    """Send what comes. A busy host reads nothing, and the caller must not wait for that."""
    with suppress(OSError):  # the host has ended, as `Host.take` finds
        while True:
            connection.send(outbox.get())


def write_figures(**figures: Any) -> None:
    """Print a line of JSON, and append it to the file that RLHFLESS_GPU_RESULTS names."""
    line = json.dumps(figures, default=float)
    print(line)
    if path := os.environ.get("RLHFLESS_GPU_RESULTS"):
        with open(path, "a") as file:
            file.write(line + "\n")


def serve(kind: str, connection: Connection, log: str, environment: dict[str, str]) -> None:
    """Answer calls until the other side is gone."""
    os.environ.update({"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", **environment})
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("rollout", "learn")]
    tools: Any = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            tools = tools or globals()[kind]()
            answer = True, getattr(tools, method)(*arguments)
        except Exception:
            answer = False, traceback.format_exc()[-3000:]
        connection.send(answer)
        if not answer[0] and "CUDA error" in answer[1]:
            return  # no call of this process works after that


class HostedEngine:
    """An engine in a host, which builds it in the background, and again after the process has died. The caller loads weights."""

    def __init__(self, host: Host, name: str, files: dict[str, bytes], settings: Any, *how: Any) -> None:
        """`how`: further arguments of `EngineTools.open`."""
        self.host, self.name, self.arguments = host, name, (name, files, settings, *how)
        self.ticket: tuple[int, int] | None = host.send("open", *self.arguments)
        self.generation = 0  # of the process that has the engine
        self.build_s = 0.0

    def ask(self, method: str, *arguments: Any, within_s: float = CALL_S) -> Any:
        if self.generation != self.host.generation or not self.host.process.is_alive():
            if self.ticket is None or self.ticket[0] != self.host.generation or not self.host.process.is_alive():
                self.ticket = self.host.send("open", *self.arguments)
            ticket, self.ticket = self.ticket, None
            self.build_s = self.host.take(ticket, OPEN_S)
            self.generation = self.host.generation
        return self.host.ask(method, self.name, *arguments, within_s=within_s)


class EngineTools:
    """Engines in one process. Only one of a process can be parked on a device, which vLLM's allocator demands."""

    def __init__(self) -> None:
        from rlhfless_ray.engine.prepare_vllm import prepare

        prepare(ON == "cpu")

        from rlhfless_ray.engine import vllm_engine
        from tests.prefix.test_engines import engine_class

        self.actor_class, self.actors = engine_class(), {}
        self.arguments, self.module = vllm_engine.engine_arguments, vllm_engine

    def warm_up(self) -> None:
        """Import, and nothing else."""

    def open(
        self,
        name: str,
        files: dict[str, bytes],
        settings: Any,
        eager: bool = True,
        parks: bool = False,
        drafter: dict[str, bytes] | None = None,
    ) -> float:
        """Build an engine and return the seconds it took. `eager`: without compiled model and CUDA graphs. `parks`: can be parked."""
        from rlhfless_ray.weights.model_folder import without_weights

        def arguments(*given: Any) -> Any:
            made = self.arguments(*given)
            made.kv_cache_memory_bytes = CACHE_BYTES
            if ON != "cpu":
                made.enforce_eager, made.enable_sleep_mode = eager, parks
            return made

        from vllm.distributed import parallel_state

        parallel_state._EP = parallel_state._EP or parallel_state._TP  # of one rank; vLLM makes it if the first engine has experts
        start = time.perf_counter()
        self.module.engine_arguments = arguments
        self.actors[name] = self.actor_class(without_weights(files), settings, drafter)
        self.actors[name].open(2)
        self.actors[name].engine.engine.engine_core._finalizer.detach()  # its shutdown would take down what engines of a process share
        return time.perf_counter() - start

    def load(self, name: str, version: int, weights: Any, base: dict[str, bytes] | None = None) -> None:
        from rlhfless_ray.weights.checksum import digests
        from rlhfless_ray.weights.tensor_slice import whole_slices

        slices = whole_slices(weights)

        self.actors[name].load(version, slices, digests(slices), base)

    def answer(self, name: str, requests: Sequence[Any]) -> dict[int, Any]:
        """Return {key: Completion}. The keys count from 0."""
        found: dict[int, Any] = self.steps(name, requests)["done"]
        return found

    def steps(self, name: str, requests: Sequence[Any]) -> dict[str, Any]:
        """Generate, and return {"done": {key: Completion}, "steps", "drafted", "accepted", "seconds"}. The keys count from 0."""
        import numpy as np

        from rlhfless_ray.rollout.token_log import TokenLog

        token_log, steps = TokenLog(list(requests)), []
        token_log.assign(np.arange(len(requests)), 0)
        start = time.perf_counter()
        for deltas, made, _ in self.actors[name].rollout(time.monotonic_ns(), list(requests), float("inf"), 2):
            token_log.accept(0, "engine", deltas)
            steps += made
        return {
            "done": token_log.completions,
            "steps": len(steps),
            "drafted": sum(step.drafted for step in steps),
            "accepted": sum(step.accepted for step in steps),
            "seconds": time.perf_counter() - start,
        }

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of the actor, see `tests.prefix.test_engines`."""
        return getattr(self.actors[name], method)(*arguments)

    def park(self, name: str) -> dict[str, Any]:
        """Park an engine. vLLM asserts that the device's free memory grows, which other processes take meanwhile."""
        import torch

        before = torch.accelerator.get_memory_info
        if ON != "cpu":
            free = before()
            torch.accelerator.get_memory_info = lambda *_: free
        try:
            return dict(self.actors[name].park())
        finally:
            torch.accelerator.get_memory_info = before

    def kernels(self, name: str) -> list[str]:
        """Return the classes of attention, of quantised products and of experts that compute in the model."""
        model = self.actors[name].engine.core.model_executor.driver_worker.get_model()
        found = set()
        for module in model.modules():
            for owner in (module, getattr(module, "quant_method", None), getattr(module, "scheme", None)):
                for part in ("impl", "kernel", "fp8_linear", "moe_kernel", "punica_wrapper"):
                    if (kernel := getattr(owner, part, None)) is not None:
                        found.add(type(kernel).__name__)
        return sorted(found)


class LearnerTools:
    """Learners in one process, one rank each."""

    def __init__(self) -> None:
        import torch

        import rlhfless_ray.learn.learner_rank  # noqa: F401
        from tests.rollout.families import LearnerHost

        torch.set_num_threads(2)
        self.host = LearnerHost()

    def warm_up(self) -> None:
        """Import, and nothing else."""

    def open(self, name: str, files: dict[str, bytes], settings: Any) -> dict[str, Any]:
        """Return the untrained weights, as they are published."""
        from rlhfless_ray.learn.learner_rank import LearnerRank

        learner = LearnerRank(replace(settings, device=ON))
        learner.open(files, ("127.0.0.1", self.host.port))
        self.host.learners[name] = learner
        return self.weights(name)

    def weights(self, name: str) -> dict[str, Any]:
        import numpy as np

        return {key: np.array(array) for key, array in self.host.weights(name).items()}

    def update(self, name: str, batch: Any) -> Any:
        return self.host.update(name, batch)

    def logprobs(self, name: str, batch: Any) -> Any:
        return self.host.logprobs(name, batch)

    def model(self, name: str) -> dict[str, bytes]:
        return self.host.model(name)

    def leave_and_return(self, name: str) -> dict[str, float]:
        """Return seconds, and MB of the device that the learner held at work and parked. Without a device nothing happens."""
        learner = self.host.learners[name]
        if ON == "cpu":
            return {}
        import torch

        def held_mb() -> float:
            return torch.cuda.memory_allocated() / 2**20

        before, start = held_mb(), time.perf_counter()
        learner.leave_device()
        parked, middle = held_mb(), time.perf_counter()
        learner.return_to_device()
        torch.cuda.synchronize()
        return {"working_mb": before, "parked_mb": parked, "leave_s": middle - start, "return_s": time.perf_counter() - middle}
