"""Small reward model folders with random weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

WORDS = [f"w{i}" for i in range(61)]


def tokenizer_files(words: list[str] = WORDS) -> dict[str, bytes]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    plain.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token=words[0], eos_token=words[1], pad_token=words[2])
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def reward_model(
    *,
    family: str = "Qwen2",
    labels: int = 1,
    head: str = "score",
    context: int = 512,
    config: dict[str, Any] | None = None,
    seed: int = 3,
    kv_heads: int = 1,
) -> dict[str, bytes]:
    """{file name: content} of a sequence classifier; `head`: the name its head's weights get; `config`: more of config.json."""
    import torch
    import transformers
    from safetensors.torch import load, save

    settings = getattr(transformers, f"{family}Config")(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        initializer_range=0.3,
        num_labels=labels,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as name:
        torch.manual_seed(seed)
        getattr(transformers, f"{family}ForSequenceClassification")(settings).save_pretrained(name)
        files = {file.name: file.read_bytes() for file in sorted(Path(name).iterdir())}
    if head != "score":
        tensors = {key.replace("score.", f"{head}."): tensor for key, tensor in load(files["model.safetensors"]).items()}
        files["model.safetensors"] = save(tensors, {"format": "pt"})
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **(config or {})}).encode()
    return {**files, **tokenizer_files()}
