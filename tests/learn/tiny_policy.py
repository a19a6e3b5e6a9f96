"""Small Qwen2 model folders with random weights, and batches for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.types import Request

VOCABULARY = 61
EOS = 1


def tiny_policy(
    seed: int = 0,
    *,
    tied: bool = False,
    dtype: str = "float32",
    context: int = 512,
    spread: float = 0.1,
    width: int = 64,
    kv_heads: int = 1,
    vocabulary: int = VOCABULARY,
    layers: int = 2,
) -> dict[str, bytes]:
    """{file name: content}; a larger `spread` of the initial weights makes a less uniform policy."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        head_dim=32,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        use_sliding_window=False,
        tie_word_embeddings=tied,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        attention_dropout=0.1,
    )
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def random_batch(
    rng: np.random.Generator, groups: int = 4, samples: int = 3, longest: int = 24, prompts: tuple[int, int] = (1, 6)
) -> Batch:
    """Random tokens, so the sampler's log-probabilities (around those of a nearly uniform policy) are made up too."""
    rows = []
    for group in range(groups):
        prompt = tuple(rng.integers(2, VOCABULARY, rng.integers(*prompts)).tolist())
        for _ in range(samples):
            response = rng.integers(2, VOCABULARY, rng.integers(1, longest)).astype(np.int32)
            drawn = (-np.log(VOCABULARY) + 0.5 * rng.normal(size=len(response))).astype(np.float32)
            rows.append((prompt, response, drawn, rng.normal(size=len(response)), group))
    return Batch.of(rows)


def in_pairs(count: int = 24, temperature: float = 1.0, seed: int = 0, longest: int = 40) -> list[Request]:
    """Prompts of `tiny_policy` in pairs, as groups have them. Every third pair's fill more than two KV blocks."""
    rng = np.random.default_rng(seed)
    made: list[Request] = []
    for key in range(count):
        if key % 2 == 0:
            size = int(rng.integers(70, 110)) if key % 6 == 0 else int(rng.integers(1, 30))
            prompt = tuple(rng.integers(2, VOCABULARY, size).tolist())
        made.append(Request(key, prompt, 1000 + 7 * key, longest, temperature))
    return made
