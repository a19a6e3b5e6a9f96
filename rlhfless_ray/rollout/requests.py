"""What a step asks of the engines. A request's seed names the sample (run, step, prompt, number), never an engine."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter

from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Prompt, Request

EVALUATION = -1  # the step that seeds of evaluations name


def step_requests(recipe: Recipe, step: int, prompts: list[Prompt], before: list[Prompt] | tuple[()] = ()) -> list[Request]:
    """`samples_per_prompt` requests for each prompt, side by side. A row that a batch holds twice, at the border of two
    epochs, is asked for twice as many samples, all different; so is one that the step has asked for `before`."""
    count, temperature = recipe.rollout.samples_per_prompt, recipe.rollout.temperature
    requests: list[Request] = []
    times = Counter(prompt.index for prompt in before)
    for prompt in prompts:
        first = count * times[prompt.index]
        times[prompt.index] += 1
        for number in range(first, first + count):
            requests.append(request(recipe, len(requests), prompt, temperature, step, number))
    return requests


def evaluation_requests(recipe: Recipe, prompts: list[Prompt], asked: list[tuple[float, int]]) -> list[Request]:
    """`asked`: temperatures and how many responses to each prompt have it. One temperature after the other, the responses to
    a prompt side by side; the same in every evaluation of a run."""
    wanted = [(temperature, prompt, n) for temperature, count in asked for prompt in prompts for n in range(count)]
    return [request(recipe, key, prompt, temperature, EVALUATION, n) for key, (temperature, prompt, n) in enumerate(wanted)]


def request(recipe: Recipe, key: int, prompt: Prompt, temperature: float, step: int, sample: int) -> Request:
    name = struct.pack("<Qqqq", recipe.run.seed % 2**64, step, prompt.index, sample)
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    most = recipe.rollout.response_tokens(len(prompt.token_ids))
    least = min(recipe.rollout.min_tokens, most)
    return Request(key, prompt.token_ids, seed, most, temperature, top_p=recipe.rollout.top_p, min_tokens=least)
