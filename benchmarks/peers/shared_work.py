"""What both systems are given: a policy, prompts and a reward, as files that either can read.

Every response has exactly `max_tokens` tokens: the tokenizer's end-of-sequence token has an id beyond the policy's
vocabulary, so it exists, as libraries expect, and can never be sampled.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

SYMBOLS = string.ascii_letters + string.digits + string.punctuation
END = "<eos>"
HEAD_WIDTH = 32

REWARD = '''"""Share of the characters that are letters a to m: dense, so that no group of random responses is all alike."""


def reward(prompt: str, response: str, row: dict) -> float:
    return sum("a" <= c.lower() <= "m" for c in response) / max(1, len(response))
'''


@dataclass(frozen=True)
class SharedWork:
    """One policy size and the work of a step, the same for every system."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    micro_sequences: int  # sequences of one micro-batch, the same in all systems
    learning_rate: float = 1e-5
    prompts: int = 8  # per step
    group: int = 8
    max_tokens: int = 128
    shortest_prompt: int = 16
    longest_prompt: int = 32
    rows: int = 1024
    temperature: float = 1.0
    seed: int = 0
    vocabulary: int = 0  # rows of the embedding; 0: the tokenizer's
    heads: int = 0  # 0: as wide as HEAD_WIDTH
    kv_heads: int = 0  # 0: as many as heads
    tied: bool = False
    dtype: str = "float32"  # of the weights in the folder
    context_tokens: int = 512

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    def write(self, folder: Path) -> Files:
        """Make the policy and its input below `folder`."""
        files = Files(folder / "policy", folder / "prompts.jsonl", folder / "reward.py")
        folder.mkdir(parents=True, exist_ok=True)
        parameters = _write_policy(self, files.policy)
        rng = np.random.default_rng(self.seed)
        with files.prompts.open("w") as file:
            for _ in range(self.rows):
                length = int(rng.integers(self.shortest_prompt, self.longest_prompt + 1))
                prompt = "".join(SYMBOLS[i] for i in rng.integers(len(SYMBOLS), size=length))
                file.write(json.dumps({"prompt": prompt}) + "\n")
        files.reward.write_text(REWARD)
        return Files(files.policy, files.prompts, files.reward, parameters)


@dataclass(frozen=True)
class Files:
    policy: Path
    prompts: Path
    reward: Path
    parameters: int = 0

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.prompts.read_text().splitlines()]


SMALL = SharedWork("0.7M", hidden=128, intermediate=384, layers=3, micro_sequences=64)
# the shape of Qwen2.5-0.5B: 494 M parameters
HALF_BILLION = SharedWork(
    "494M",
    hidden=896,
    intermediate=4864,
    layers=24,
    micro_sequences=4,
    prompts=4,
    group=4,
    max_tokens=64,
    vocabulary=151_936,
    heads=14,
    kv_heads=2,
    tied=True,
    dtype="bfloat16",
)
# the shape of Qwen2.5-1.5B
BILLION_AND_A_HALF = replace(HALF_BILLION, name="1.5B", hidden=1536, intermediate=8960, layers=28, heads=12)
LARGE = SharedWork("11M", hidden=384, intermediate=1024, layers=6, micro_sequences=64)


def _write_policy(work: SharedWork, folder: Path) -> int:
    """A Qwen2-type model from scratch with a tokenizer of one token per character; returns its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate(["<pad>", *SYMBOLS, END])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=None,
        eos_token=END,
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    config = Qwen2Config(
        vocab_size=work.vocabulary or len(vocabulary) - 1,  # all but the end of the sequence
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads or work.hidden // HEAD_WIDTH,
        num_key_value_heads=work.kv_heads or work.heads or work.hidden // HEAD_WIDTH,
        max_position_embeddings=work.context_tokens,
        use_sliding_window=False,
        tie_word_embeddings=work.tied,
        initializer_range=0.5 * work.hidden**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(work.seed)
    model = Qwen2ForCausalLM(config).to(getattr(torch, work.dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
