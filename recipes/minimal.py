"""GRPO in one file: no Ray, no vLLM, no DeepSpeed, no elasticity. Read it first.

    python recipes/minimal.py                       # the quickstart's task, policy and settings
    python recipes/minimal.py run.steps=10 run.seed=1

It takes the recipe of the quickstart and the pure functions that the runtime uses (prompts, verifier, advantages, micro-batches,
loss), and puts the plainest possible loop around them: one process, one model, Hugging Face-style sampling. The runtime computes
the same update, spread over processes that come and go. `tests/learn/test_minimal.py` compares the two.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray import Recipe
from rlhfless_ray.cli.guarded import guarded
from rlhfless_ray.learn.advantage import group_advantages
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.losses import clipped_loss, token_ratios, token_weights
from rlhfless_ray.learn.micro_batch_tensors import padded
from rlhfless_ray.learn.micro_batches import PromptSharing, micro_batches
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_model
from rlhfless_ray.learn.warm_start import warm_start
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.load_prompts import load_prompts
from rlhfless_ray.types import Prompt
from rlhfless_ray.weights.load_policy import cache_policy, initial_policy, policy_tokenizer
from rlhfless_ray.weights.model_folder import write_folder

QUICKSTART = Path(__file__).parent / "quickstart.yaml"


@dataclass
class Response:
    """One sampled response: token ids and their log-probabilities, both (length,), with the reward of its text."""

    prompt: Prompt
    token_ids: np.ndarray
    logprobs: np.ndarray
    reward: float


def main(overrides: list[str]) -> float:
    """Train, print one line a step, and return the held-out accuracy of sampled responses."""
    recipe = Recipe.load(QUICKSTART, overrides)
    torch.manual_seed(recipe.run.seed)
    model, tokenizer = load_policy(recipe)
    prompts = load_prompts(recipe, tokenizer)
    policy = TokenLogprobs(model)  # a micro-batch in, log-probabilities of response tokens out
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.learner.learning_rate, weight_decay=0.0)
    order = np.random.default_rng(recipe.run.seed)

    print(f"before: {evaluate(model, prompts.heldout, tokenizer, recipe):.1%} of held-out prompts right")
    for step in range(1, recipe.run.steps + 1):
        began_s = time.perf_counter()
        rows = order.choice(len(prompts.train), recipe.prompts.batch_prompts, replace=False)
        responses = rollout(model, [prompts.train[row] for row in rows], recipe.rollout.samples_per_prompt, tokenizer, recipe)
        batch = make_batch(responses, recipe.rollout.samples_per_prompt)
        loss = update(policy, optimizer, batch, recipe)
        reward = np.mean([response.reward for response in responses])
        print(f"step {step}: reward {reward:.2f}, loss {loss:+.4f}, {time.perf_counter() - began_s:.1f} s", flush=True)
    accuracy = evaluate(model, prompts.heldout, tokenizer, recipe)
    print(f"after: {accuracy:.1%} of held-out prompts right")
    return accuracy


def load_policy(recipe: Recipe) -> tuple[torch.nn.Module, object]:
    """Load the recipe's policy from its cache, or make one from scratch and train it on supervised examples first."""
    files, needs_warm_start = initial_policy(recipe)
    if needs_warm_start:
        print(f"supervised warm start: {recipe.warm_start.steps} steps, cached afterwards", flush=True)
        files = warm_start(files, recipe, torch.get_num_threads())
        cache_policy(recipe, files)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(write_folder(Path(folder), files), recipe.policy.dtype, trust_remote_code=False)
    return model, policy_tokenizer(recipe, files)


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: list[Prompt], max_tokens: int, temperature: float, end: int) -> list[tuple[Tensor, Tensor]]:
    """Sample one response to each prompt. Returns token ids and log-probabilities, both (length,), end token included.

    Prompts are padded on the left, so that every sequence's newest token stands in the last column.
    """
    width = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.tensor([[end] * (width - len(p.token_ids)) + list(p.token_ids) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts])
    cache, tokens, logprobs = None, list[Tensor](), list[Tensor]()
    running = torch.ones(len(prompts), dtype=torch.bool)
    while running.any() and len(tokens) < max_tokens:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        log_probs = torch.log_softmax(out.logits[:, -1].float() / temperature, dim=-1)
        ids = torch.multinomial(log_probs.exp(), 1)
        tokens.append(ids[:, 0])
        logprobs.append(log_probs.gather(1, ids)[:, 0])
        running &= ids[:, 0] != end
        mask, cache = torch.cat([mask, torch.ones_like(ids)], dim=1), out.past_key_values
    columns, chosen = torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)
    ended = (columns == end).int().argmax(1) + 1
    lengths = torch.where((columns == end).any(1), ended, columns.shape[1]).tolist()
    return [(columns[i, :n], chosen[i, :n]) for i, n in enumerate(lengths)]


def rollout(model: torch.nn.Module, prompts: list[Prompt], count: int, tokenizer, recipe: Recipe) -> list[Response]:
    """Sample and score `count` responses to each prompt. Responses to one prompt are neighbours."""
    verify = task(recipe.prompts.task).verify
    asked = [prompt for prompt in prompts for _ in range(count)]
    drawn = sample(model, asked, recipe.rollout.max_tokens, recipe.rollout.temperature, tokenizer.eos_token_id)
    return [
        Response(prompt, ids.numpy(), logprobs.numpy(), verify(tokenizer.decode(ids.tolist(), skip_special_tokens=True), prompt.row))
        for prompt, (ids, logprobs) in zip(asked, drawn, strict=True)
    ]


def make_batch(responses: list[Response], count: int) -> Batch:
    """Convert responses to flat arrays, each with its advantage over the others of its prompt."""
    rewards = np.array([response.reward for response in responses]).reshape(-1, count)
    advantages = group_advantages(rewards).ravel()
    return Batch.of(
        [
            (r.prompt.token_ids, r.token_ids, r.logprobs, float(advantage), i // count)
            for i, (r, advantage) in enumerate(zip(responses, advantages, strict=True))
        ]
    )


def update(policy: TokenLogprobs, optimizer: torch.optim.Optimizer, batch: Batch, recipe: Recipe) -> float:
    """Take one optimizer step on the clipped surrogate loss. Returns the loss, a mean over all response tokens of the batch."""
    algorithm, cpu = recipe.algorithm, torch.device("cpu")
    weights = token_weights(torch.from_numpy(batch.response_lengths), algorithm.loss_mean).float()
    advantages = torch.from_numpy(batch.advantages)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    sharing = PromptSharing.of(policy.model)
    for cut in micro_batches(batch, np.arange(len(batch)), recipe.learner.max_micro_batch_tokens, sharing):
        x = padded(batch, cut, cpu)
        logprobs, _ = policy(recipe.rollout.temperature, **x)
        ratios = token_ratios(logprobs, logprobs.detach())  # one optimizer step a batch: the old policy is the current one
        token_loss, _ = clipped_loss(ratios, advantages[x["flat"]], algorithm.clip_low, algorithm.clip_high)
        loss = (weights[x["sequence"]] * token_loss).sum()
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), recipe.learner.grad_clip or float("inf"))
    optimizer.step()
    return total


def evaluate(model: torch.nn.Module, prompts: list[Prompt], tokenizer, recipe: Recipe) -> float:
    """Return the share of prompts whose one sampled response is right."""
    return float(np.mean([response.reward for response in rollout(model, prompts, 1, tokenizer, recipe)]))


if __name__ == "__main__":
    guarded(lambda: main(sys.argv[1:]))  # a mistake in a key is one sentence
