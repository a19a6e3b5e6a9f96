"""Bare vLLM generation of a step's tokens: `python -m benchmarks.peers.bare_vllm SETTINGS.json`, a part of the ceiling.

Says `ready` when it has warmed up; then for every line on standard input (`plain` or `logprobs`) generates its share of the
next step's samples and prints the seconds it took. vLLM's own sampler, without log-probabilities unless asked: the least any
system that generates with vLLM can do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ[name] = value
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    torch.set_num_threads(settings["threads"])
    engine = LLM(
        model=settings["policy"],
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        max_model_len=settings["longest"],
        max_num_seqs=256,
        block_size=32,
        kv_cache_memory_bytes=256 * 2**20,
        disable_log_stats=True,
    )

    def generate(logprobs: bool) -> float:
        params = SamplingParams(
            temperature=settings["temperature"],
            max_tokens=settings["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if logprobs else None,
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in settings["prompts"] for _ in range(settings["group"])]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert tokens == len(prompts) * settings["max_tokens"], f"{tokens} tokens came"
        return seconds

    torch.set_num_threads(settings["threads"])  # vLLM may have changed it
    generate(False)
    print("ready", flush=True)
    for line in sys.stdin:
        print(generate(line.strip() == "logprobs"), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)  # vLLM's exit hooks linger
