"""Tokens per second of bare vLLM, the stock engine and the exact one. `python -m benchmarks.stock_engine [--size SIZE]`.

Each engine has a process of its own, and they take turns: one batch each, in several rounds, so that other work on the machine meets all
of them. A batch is so many responses of the same length, sampled at temperature 1, with the log-probability of each token. Bare vLLM is its
`LLM` class. The two engines of the runtime stream their tokens every 0.25 s, as in a run. The policy's weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from rich.table import Table

from benchmarks.common.results import Target, make_console, save
from benchmarks.peers.shared_work import HALF_BILLION, LARGE, SMALL

WORK = {work.name: work for work in (SMALL, LARGE, HALF_BILLION)}
KINDS = ("bare", "stock", "exact")
BATCHES = {"0.7M": (8, 32), "11M": (8, 32), "494M": (8,)}  # by size, so that a full run takes three minutes
TOKENS = {"0.7M": 64, "11M": 128, "494M": 24}
PROMPT, STREAM_S = 24, 0.25
SETTINGS = {"max_model_len": 256, "max_running": 32, "block_size": 32, "kv_cache_mb": 64, "gpu_memory_share": 0.5}
Generate = Callable[[list[list[int]], int], int]


def bare(folder: Path) -> Generate:
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")
    from vllm import LLM, SamplingParams, TokensPrompt

    from rlhfless_ray.engine.engine_arguments import common_arguments
    from rlhfless_ray.engine.engine_settings import EngineSettings

    engine = LLM(**common_arguments(folder, EngineSettings(**SETTINGS), "dummy"), logprobs_mode="processed_logprobs")

    def generate(prompts: list[list[int]], tokens: int) -> int:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        outputs = engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def ours(kind: str, folder: Path) -> Generate:
    import torch

    from rlhfless_ray.engine.engine_settings import EngineSettings
    from rlhfless_ray.types import Request
    from rlhfless_ray.weights.model_folder import read_folder, stored_weights
    from rlhfless_ray.weights.tensor_file import as_numpy

    settings, engine = EngineSettings(**SETTINGS), None  # type: ignore[arg-type]
    if kind == "stock":
        from rlhfless_ray.engine.stock_engine import StockEngine

        engine = StockEngine(folder, settings)
    else:
        from rlhfless_ray.engine.vllm_engine import VllmEngine

        torch.set_num_threads(1)
        engine = VllmEngine(folder, settings)
        torch.set_num_threads(1)
    engine.load(1, {name: as_numpy(tensor) for name, tensor in stored_weights(read_folder(folder))})

    def generate(prompts: list[list[int]], tokens: int) -> int:
        requests = [Request(key, tuple(prompt), time.time_ns() + key, tokens, 1.0) for key, prompt in enumerate(prompts)]
        return sum(int(deltas.counts.sum()) for deltas in engine.generate(requests, STREAM_S))

    return generate


def processor_s() -> float:
    """Return the processor seconds of this process and those below it."""
    own = psutil.Process()
    return sum(times.user + times.system for one in (own, *own.children(recursive=True)) if (times := one.cpu_times()))


def serve(kind: str, folder: Path) -> None:
    """Build an engine, then answer each line with a batch size and a length by the seconds and tokens that the batch took."""
    generate = bare(folder) if kind == "bare" else ours(kind, folder)
    rng = np.random.default_rng(0)
    print("ready", flush=True)
    for line in sys.stdin:
        batch, length = map(int, line.split())
        prompts = rng.integers(2, 60, (batch, PROMPT)).tolist()
        wall_s, cpu_s = time.perf_counter(), processor_s()
        tokens = generate(prompts, length)
        found = {"wall_s": time.perf_counter() - wall_s, "cpu_s": processor_s() - cpu_s, "tokens": tokens}
        print(json.dumps(found), flush=True)
    for child in psutil.Process().children(recursive=True):  # bare vLLM's process would outlive this one
        child.kill()
    os._exit(0)


def measure(folder: Path, size: str, rounds: int) -> list[dict[str, Any]]:
    """Return one row for each engine, batch size and round."""
    workers = {}
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.stock_engine", "--one", kind, str(folder)]
        workers[kind] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for worker in workers.values():
        while (line := worker.stdout.readline()) and line.strip() != "ready":  # type: ignore[union-attr]
            pass
        for batch in BATCHES[size]:
            ask(worker, batch, 4)  # the first batches allocate
    rows = []
    for number in range(rounds):
        for batch in BATCHES[size]:
            for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
                rows.append({"engine": kind, "batch": batch, "round": number, **ask(workers[kind], batch, TOKENS[size])})
    for worker in workers.values():
        worker.stdin.close()  # type: ignore[union-attr]
        worker.wait(60)
    return rows


def ask(worker: subprocess.Popen[str], batch: int, tokens: int) -> dict[str, Any]:
    print(batch, tokens, file=worker.stdin, flush=True)
    for line in worker.stdout or ():
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"the engine ended with status {worker.wait(60)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=WORK, default="11M", help="of the policy, in float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="show that it runs")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # kind and folder
    options = parser.parse_args()
    if options.one:
        serve(options.one[0], Path(options.one[1]))
    size, rounds = ("0.7M", 2) if options.quick else (options.size, options.rounds)
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="stock-engine-") as scratch:
        rows = measure(WORK[size].write(Path(scratch)).policy, size, rounds)
    assert all(row["tokens"] == row["batch"] * TOKENS[size] for row in rows)

    def rate(kind: str, batch: int, number: int, unit: str) -> float:
        return next(r["tokens"] / r[unit] for r in rows if (r["engine"], r["batch"], r["round"]) == (kind, batch, number))

    def share(kind: str, batch: int, unit: str) -> float:
        """Median over rounds of an engine's tokens per second as a share of bare vLLM's in the same round."""
        return median(rate(kind, batch, number, unit) / rate("bare", batch, number, unit) for number in range(rounds))

    table = Table("batch", "engine", "tokens/s", "of bare vLLM", "tokens per processor-second", "of bare vLLM", title=f"{size}, float32")
    for batch in BATCHES[size]:
        for kind in KINDS:
            cells = [
                cell
                for unit in ("wall_s", "cpu_s")
                for cell in (f"{median(rate(kind, batch, n, unit) for n in range(rounds)):.1f}", f"{share(kind, batch, unit):.3f}")
            ]
            table.add_row(str(batch), kind, *cells)
    console.print(table)
    targets = [Target(f"stock beside bare vLLM, {batch} responses", share("stock", batch, "wall_s"), least=0.97) for batch in BATCHES[size]]
    shares = {unit: {kind: {str(b): share(kind, b, unit) for b in BATCHES[size]} for kind in KINDS} for unit in ("wall_s", "cpu_s")}
    save(
        f"stock_engine_{size}",
        {"size": size, "tokens": TOKENS[size], "share": shares, "rows": rows},
        targets,
        console=console,
        quick=options.quick,
    )


if __name__ == "__main__":
    main()
