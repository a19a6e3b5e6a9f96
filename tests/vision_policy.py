"""Small random policies that see images, and images drawn by code."""

from __future__ import annotations

import io
from pathlib import Path

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + PLACE + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vision_tokenizer():
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def vision_policy(family: str, folder: Path, max_pixels: int = 28 * 28 * 16) -> Path:
    """Write a policy of `qwen2_vl`, `qwen2_5_vl` or `qwen3_vl` with two layers and a patch of 14 pixels."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = vision_tokenizer()
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    text = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, **sizes}
    text |= {"max_position_embeddings": 512, "initializer_range": 0.1, "head_dim": 32, "eos_token_id": tokenizer.eos_token_id}
    rotary = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    tower = {"depth": 2, "num_heads": 2, "patch_size": 14, "initializer_range": 0.1}
    if family == "qwen2_vl":
        tower |= {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}
    else:
        tower |= {**sizes, "out_hidden_size": 64}
    if family == "qwen2_5_vl":
        tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
    if family == "qwen3_vl":
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        rotary["mrope_interleaved"] = True
    stem = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}
    config = getattr(transformers, f"{stem}Config")(
        text_config={**text, "rope_parameters": rotary}, vision_config=tower, tie_word_embeddings=True, **ids
    )
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": max_pixels}).save_pretrained(folder)
    return folder


def drawn(width: int, height: int, seed: int = 0, file_format: str = "png") -> bytes:
    """Return an encoded image of random pixels."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(file, file_format)
    return file.getvalue()
