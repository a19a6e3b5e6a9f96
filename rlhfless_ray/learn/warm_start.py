"""Supervised steps before the first rollout, in plain torch, which teach the policy the task's format.

If a change here alters the result, change `load_policy.VERSION` too, because the result is cached.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tensor_file import Files
from rlhfless_ray.weights.tiny_model import folder_files

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

BUCKET_BATCHES = 32  # batches drawn together and sorted by length, so that a batch holds little padding
TEMPLATE_EVERY = 5  # in batches; a long template in each batch would make the warm start several times as long
IGNORE = -100
GAP = "\0"


def warm_start(files: Files, recipe: Recipe, threads: int, progress: Callable[[int, int, float], None] | None = None) -> Files:
    """Train a model folder on the task's generated responses, and return the files of the trained folder.

    The loss is the mean cross-entropy over response tokens, end-of-sequence included; prompts are context only. Every fifth
    batch uses `prompts.input_template`, if there is one: the other batches teach the task at less cost. The result follows from the
    recipe's seed and the thread count. `progress(step, steps, loss)` is called after every step. Raises RunError if the loss is not
    finite.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    section = recipe.warm_start
    if section.steps == 0:
        return files
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), files)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=section.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        model.train()
        batches = _batches(recipe, tokenizer)
        for step in range(section.steps):
            for group in optimizer.param_groups:
                group["lr"] = section.learning_rate * _schedule(step, section.steps)
            tokens, labels = next(batches)
            # Padding is on the right, so the causal mask alone hides it.
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
            value = loss.item()
            if not math.isfinite(value):
                raise RunError(f"warm start: the loss is {value} at step {step + 1} of {section.steps}; lower warm_start.learning_rate")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if progress is not None:
                progress(step + 1, section.steps, value)
    finally:
        torch.set_num_threads(threads_before)
    return folder_files(model.to(getattr(torch, recipe.policy.dtype)), tokenizer)


def _schedule(step: int, steps: int) -> float:
    """Return the share of the peak rate: linear warm-up over the first tenth, then cosine to zero."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _batches(recipe: Recipe, tokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels, both (batch, tokens) int64. Labels are IGNORE outside the response."""
    from rlhfless_ray.prompts.builtin_tasks import task as find_task

    task, batch_size, template = find_task(recipe.prompts.task), recipe.warm_start.batch_size, recipe.prompts.input_template
    before, after = ([], []) if template is None else tokenizer(template.format(GAP).split(GAP), add_special_tokens=False)["input_ids"]
    rng = np.random.default_rng([recipe.run.seed % 2**63, 2])
    while True:
        # Each bucket has another seed, so rows never repeat. They are from the training split only.
        rows = task.rows(batch_size * BUCKET_BATCHES, int(rng.integers(2**62)), "train")
        prompts = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
        responses = tokenizer([task.example(row, rng) for row in rows], add_special_tokens=False)["input_ids"]
        pairs = [(p, [*r, tokenizer.eos_token_id]) for p, r in zip(prompts, responses, strict=True)]
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        for number, batch in enumerate(rng.permutation(BUCKET_BATCHES)):
            chosen = pairs[batch * batch_size : (batch + 1) * batch_size]
            if number % TEMPLATE_EVERY == 0:
                chosen = [([*before, *prompt, *after], response) for prompt, response in chosen]
            yield _padded(chosen, tokenizer.pad_token_id)


def _padded(pairs: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    tokens = np.full((len(pairs), width), pad)
    labels = np.full((len(pairs), width), IGNORE)
    for i, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        tokens[i, :end] = prompt + response
        labels[i, len(prompt) : end] = response
    return torch.from_numpy(tokens), torch.from_numpy(labels)
