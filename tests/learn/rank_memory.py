"""Bytes of a real trainer of one rank, per parameter, as a line of JSON for each case: python rank_memory.py DTYPE:STAGE [DTYPE:STAGE …]

Each case has a process of its own, forked after the imports. DTYPE:shards: two ranks of ZeRO 3 open a policy of this type from
files in bfloat16, publish it, and write it and its moving average as model folders. Each says how much private memory it took at most,
and what it returned, as shares of the policy's bytes. DTYPE:critic, DTYPE:adapters: they only open a critic, or a policy with adapters.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhfless_ray.learn.policy_model import TokenLogprobs, TokenValues, load_critic, load_model
from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.tensor_file import as_numpy

SHAPE = {"vocab_size": 2000, "num_hidden_layers": 6, "hidden_size": 768, "intermediate_size": 2304, "num_attention_heads": 12}


def own_bytes(field: str = "VmRSS") -> int:
    """Of this process; `VmHWM`: the most that it had since the last `forget_peak`. The kernel counts it, at no cost."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(dtype: str, stage: int) -> None:
    torch.set_num_threads(1)
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"dtype": dtype}, "learner": {"zero_stage": stage}}
    trainer = TrainerRank(learner_settings(Recipe.parse(tree)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trainer.join_process_group(("127.0.0.1", port))
    Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"num_hidden_layers": 1}))  # imports come before the first look
    gc.collect()  # or that model may go after it
    before = own_bytes()
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=12, tie_word_embeddings=False)).to(getattr(torch, dtype))
    parameters = sum(p.numel() for p in model.parameters())
    trainer.open(TokenLogprobs(model), None)
    loaded = own_bytes()
    forget_peak()
    ids, rows, columns = torch.arange(16)[None], torch.zeros(4, dtype=torch.long), torch.arange(4)
    for _ in range(2):
        logprobs, _ = trainer.engine(1.0, ids=ids, rows=rows, columns=columns, targets=ids[0, 1:5])
        trainer.backward(-logprobs.sum())
        trainer.update(True)
    found = {"loaded": loaded - before, "idle": own_bytes() - before, "peak": own_bytes("VmHWM") - before}
    print(json.dumps({"parameters": parameters} | {name: size / parameters for name, size in found.items()}), flush=True)


class Peak:
    """The most private memory that the process took inside the block, in bytes. Pages of mapped files are not private."""

    def __enter__(self) -> Peak:
        self.before, self.most, self.done = own_bytes("RssAnon"), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.002):
            self._look()

    def _look(self) -> None:
        self.most = max(self.most, own_bytes("RssAnon") - self.before)

    def __exit__(self, *about: object) -> None:
        if not self.done.is_set():
            self.done.set()
            self.thread.join()
            self._look()


def measure_shards(kind: str, dtype: str, rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    tree: dict[str, Any] = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"dtype": dtype}}
    tree |= {"learner": {"zero_stage": 3, "ranks": 2}}
    tree |= {"shards": {"ema": {"beta": 0.9}}, "adapters": {"lora": {"rank": 4}}}.get(kind, {})
    settings = learner_settings(Recipe.parse(tree))
    trainer = TrainerRank(replace(settings, rank=rank))
    trainer.join_process_group(("127.0.0.1", port))
    initialize, opening = deepspeed.initialize, Peak()

    def initialized(**arguments: object) -> object:
        opening.__exit__()  # what comes next is optimizer state
        return initialize(**arguments)

    deepspeed.initialize = initialized
    with Peak():
        pass  # a first thread's stack
    with opening:
        if kind == "critic":
            wrapped: Any = TokenValues(load_critic(folder, dtype, False, "value_head", 0, maps=True))
        else:
            wrapped = TokenLogprobs(load_model(folder, dtype, False, maps=True))
        parameters = sum(p.numel() for p in wrapped.parameters())
        size = parameters * getattr(torch, dtype).itemsize
        trainer.open(wrapped, None, "CAUSAL_LM")
    dtypes = {str(p.dtype).removeprefix("torch.") for p in wrapped.parameters()}
    found = {"kind": kind, "rank": rank, "dtypes": sorted(dtypes), "opening": opening.most / size}
    if kind == "shards":
        found |= measure_files(trainer, dtype, folder, size)
    sys.stdout.write(json.dumps(found) + "\n")  # in one piece: other ranks write there too
    sys.stdout.flush()


def measure_files(trainer: TrainerRank, dtype: str, folder: Path, size: int) -> dict[str, float]:
    with Peak() as publishing:
        published = trainer.weights()
    tensors = load_file(folder / "model.safetensors")
    assert {piece.name for piece in published} == tensors.keys()
    for piece, values in published.items():
        flat = as_numpy(tensors[piece.name].to(getattr(torch, dtype))).reshape(-1)
        assert len(values) < len(flat) and values.tobytes() == flat[piece.start : piece.end].tobytes(), piece
    own = sum(values.nbytes for values in published.values())
    found = {"published": own / size, "publishing": publishing.most / size}
    for name, trained in (("model", False), ("average", True)):
        gc.collect()
        with Peak() as writing:
            files = trainer.model_files(trained=trained)
        whole = size * (4 // getattr(torch, dtype).itemsize if trained else 1)  # averages are in float32
        found |= {name: sum(map(len, files.values())) / whole, f"writing {name}": writing.most / whole}
    return found


def start_shards(kind: str, dtype: str) -> None:
    """Run `measure_shards` in two processes."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        wait(fork(save_model, folder))  # the ranks would use the memory that it leaves behind
        processes = [fork(measure_shards, kind, dtype, rank, port, Path(folder)) for rank in range(2)]
        for process in processes:
            wait(process)


def save_model(folder: str) -> None:
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=12, tie_word_embeddings=False)).to(torch.bfloat16).save_pretrained(folder)


def wait(process: int) -> None:
    assert os.waitpid(process, 0)[1] == 0


def fork(work: Callable[..., None], *arguments: Any) -> int:
    """Run a function in a forked process, and return the process's id."""
    if process := os.fork():
        return process
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(cases: list[str]) -> None:
    gc.freeze()  # or a collection would copy what the processes share
    for case in cases:
        dtype, _, stage = case.partition(":")
        wait(fork(measure, dtype, int(stage)) if stage.isdigit() else fork(start_shards, stage, dtype))


if __name__ == "__main__":
    main(sys.argv[1:])
