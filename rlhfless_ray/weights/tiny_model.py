"""Create a policy from scratch: a small Llama-type model folder with random weights, for built-in tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from rlhfless_ray.prompts.builtin_tasks import Task
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

MROPE_SECTION = [4, 6, 6]  # halves of a head's width for time, height and width
HEAD_WIDTH = 32  # vLLM's CPU attention refuses 16


def scratch_policy(recipe: Recipe | SupervisedRecipe, task: Task) -> Files:
    """Return a Hugging Face model folder as {file name: content}. The weights follow from the run's seed.

    It has config.json, generation_config.json, model.safetensors and the tokenizer's files. AutoModelForCausalLM, AutoTokenizer and
    vLLM can load it.
    """
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

    from rlhfless_ray.prompts.task_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(task)
    width = recipe.policy.hidden_size
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "initializer_range": 0.5 * width**-0.5,  # the default of 0.02 suits widths in the thousands
    }
    text = {
        **sizes,
        "vocab_size": len(tokenizer),
        "num_hidden_layers": recipe.policy.layers,
        "num_attention_heads": width // HEAD_WIDTH,
        "num_key_value_heads": width // HEAD_WIDTH,
        "max_position_embeddings": recipe.policy.context_tokens,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    make: Callable[[Any], PreTrainedModel] = Qwen2ForCausalLM
    config: PretrainedConfig = Qwen2Config(**text, tie_word_embeddings=False)
    if task.sees_images:
        make, config = Qwen2_5_VLForConditionalGeneration, _vision_config(tokenizer, text, sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.run.seed % 2**63)
        model = make(config).to(getattr(torch, recipe.policy.dtype))
    return folder_files(model, tokenizer) | (_image_processor() if task.sees_images else {})


def _vision_config(tokenizer: PreTrainedTokenizerBase, text: JsonObject, sizes: JsonObject) -> PretrainedConfig:
    """Return the configuration of a small policy that sees images: one layer of vision tower before the text model."""
    from transformers import Qwen2_5_VLConfig

    from rlhfless_ray.prompts.builtin_tasks import IMAGE_TOKENS, MERGE, PATCH

    heads, ids = text["num_attention_heads"], {key: tokenizer.convert_tokens_to_ids(token) for key, token in IMAGE_TOKENS.items()}
    tower = {**sizes, "depth": 1, "num_heads": heads, "out_hidden_size": sizes["hidden_size"], "patch_size": PATCH}
    tower |= {"spatial_merge_size": MERGE, "window_size": 4 * PATCH, "fullatt_block_indexes": [0]}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": MROPE_SECTION}
    ends = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rotary}, vision_config=tower, tie_word_embeddings=False, **ids)
    for key, token in ends.items():  # generation_config.json is made from these
        setattr(config, key, token)
    return config


def _image_processor() -> Files:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from rlhfless_ray.prompts.builtin_tasks import CELL, CELLS, MERGE, PATCH

    size = {"shortest_edge": CELL**2, "longest_edge": (CELLS * CELL) ** 2}
    with tempfile.TemporaryDirectory() as folder:
        Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size).save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def folder_files(model, tokenizer) -> Files:
    """Return the files that `save_pretrained` of both writes, as {file name: content}."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
