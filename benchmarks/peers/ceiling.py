"""The ceiling: a step made of plain torch learning and bare vLLM generation, with no system around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import Spread
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import end_process, end_with_parent
from benchmarks.peers.shared_work import Files, SharedWork


@dataclass(frozen=True)
class Ceiling:
    """Seconds of each repetition."""

    one_engine_s: list[float]  # all cores as threads of one engine
    many_engines_s: list[float]  # one engine per core, with one thread and its share of the prompts each
    logprobs_s: list[float]  # the faster of the two, with the sampled tokens' log-probabilities as well
    learn_s: list[float]


def measure_ceiling(work: SharedWork, files: Files, scratch: Path, *, threads: int, repeats: int) -> Ceiling:
    """One part after the other, each in processes of its own, warmed up before it is timed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files.policy)
    texts = [row["prompt"] for row in files.rows()[: work.prompts]]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    shared = {
        "policy": str(files.policy),
        "group": work.group,
        "max_tokens": work.max_tokens,
        "temperature": work.temperature,
        "longest": work.longest_prompt + work.max_tokens,
        "learning_rate": work.learning_rate,
        "micro_sequences": work.micro_sequences,
    }
    one = {**shared, "prompts": prompts, "threads": threads}
    with parts("bare_vllm", [one], scratch) as engines:
        one_engine = [rounds(engines, "plain") for _ in range(repeats)]
        one_logprobs = [rounds(engines, "logprobs") for _ in range(repeats)]
    shares = [{**shared, "prompts": prompts[i::threads], "threads": 1} for i in range(threads)]
    with parts("bare_vllm", shares, scratch) as engines:
        many_engines = [rounds(engines, "plain") for _ in range(repeats)]
        many_logprobs = [rounds(engines, "logprobs") for _ in range(repeats)]
    with parts("plain_torch", [one], scratch) as learner:
        learn = [rounds(learner, "go") for _ in range(repeats)]
    logprobs = min(one_logprobs, many_logprobs, key=lambda times: Spread.of(times).median)
    return Ceiling(one_engine, many_engines, logprobs, learn)


@contextmanager
def parts(module: str, settings: list[dict[str, Any]], scratch: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ready to be timed, one per entry of `settings`."""
    with ExitStack() as stack:
        processes = []
        for number, content in enumerate(settings):
            path = scratch / f"{module}_{number}.json"
            path.write_text(json.dumps(content))
            log = stack.enter_context((scratch / f"{module}_{number}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.peers.{module}", str(path)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=end_with_parent,
                env={**os.environ, "OMP_NUM_THREADS": str(content["threads"])},
            )
            stack.callback(_end, process)
            processes.append(process)
        for number, process in enumerate(processes):
            while (line := process.stdout.readline()).strip() != "ready":  # a library may print before it
                if not line:
                    tail = (scratch / f"{module}_{number}.log").read_text()[-2000:]
                    raise RuntimeError(f"benchmarks.peers.{module} ended before it was ready: {tail}")
        yield processes


def rounds(processes: list[subprocess.Popen[str]], line: str) -> float:
    """Start all of them at once; seconds until the last one is done."""
    start = time.perf_counter()
    for process in processes:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    for process in processes:
        float(process.stdout.readline())
    return time.perf_counter() - start


def _end(process: subprocess.Popen[str]) -> None:
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    end_process(process)
