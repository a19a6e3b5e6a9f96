"""Create a policy from scratch: a small Llama-type model folder with random weights, for built-in tasks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from rlhfless_ray.prompts.builtin_tasks import Task
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

HEAD_WIDTH = 32  # vLLM's CPU attention refuses 16


def scratch_policy(recipe: Recipe | SupervisedRecipe, task: Task) -> Files:
    """Return a Hugging Face model folder as {file name: content}. The weights follow from the run's seed.

    It has config.json, generation_config.json, model.safetensors and the tokenizer's files. AutoModelForCausalLM, AutoTokenizer and
    vLLM can load it.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhfless_ray.prompts.task_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(task)
    width = recipe.policy.hidden_size
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=recipe.policy.layers,
        num_attention_heads=width // HEAD_WIDTH,
        num_key_value_heads=width // HEAD_WIDTH,
        max_position_embeddings=recipe.policy.context_tokens,
        use_sliding_window=False,
        tie_word_embeddings=False,
        initializer_range=0.5 * width**-0.5,  # the default of 0.02 suits widths in the thousands
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.run.seed % 2**63)
        model = Qwen2ForCausalLM(config).to(getattr(torch, recipe.policy.dtype))
    return folder_files(model, tokenizer)


def folder_files(model, tokenizer) -> Files:
    """Return the files that `save_pretrained` of both writes, as {file name: content}."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
