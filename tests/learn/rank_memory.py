"""Bytes of a real trainer of one rank, per parameter, as a line of JSON for each case: python rank_memory.py DTYPE:STAGE [DTYPE:STAGE …]

Each case has a process of its own, forked after the imports.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import sys
import traceback
from pathlib import Path

import deepspeed  # noqa: F401
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhfless_ray.learn.policy_model import TokenLogprobs
from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe import Recipe

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
        trainer.step(True)
    found = {"loaded": loaded - before, "idle": own_bytes() - before, "peak": own_bytes("VmHWM") - before}
    print(json.dumps({"parameters": parameters} | {name: size / parameters for name, size in found.items()}), flush=True)


def main(cases: list[str]) -> None:
    gc.freeze()  # or a collection would copy what the processes share
    for case in cases:
        if (process := os.fork()) == 0:
            try:
                dtype, stage = case.split(":")
                measure(dtype, int(stage))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0, case


if __name__ == "__main__":
    main(sys.argv[1:])
