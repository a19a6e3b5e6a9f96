"""Make the requests of a step. A request's seed identifies the sample (run, step, prompt, number), never an engine."""

from __future__ import annotations

import hashlib
import struct

from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Prompt, Request, SampleId

EVALUATION = -1  # begun_step of the responses of evaluations; one less for each further temperature
GENERATION = 0  # of those of `rlhfless generate`, whose tokens no batch and no resume changes


def make_evaluation_requests(recipe: Recipe, prompts: list[Prompt], settings: list[tuple[float, int]]) -> list[Request]:
    """Make the requests of an evaluation, the same for every evaluation of a run. `settings`: (temperature, responses per prompt).

    Temperatures follow one another, and the responses to a prompt are adjacent.
    """
    wanted = [
        (prompt, temperature, SampleId(prompt.index, EVALUATION - place, n))
        for place, (temperature, count) in enumerate(settings)
        for prompt in prompts
        for n in range(count)
    ]
    return [make_request(recipe, key, *one) for key, one in enumerate(wanted)]


def make_request(recipe: Recipe, key: int, prompt: Prompt, temperature: float, sample_id: SampleId) -> Request:
    name = struct.pack("<Qqqq", recipe.run.seed % 2**64, sample_id.begun_step, sample_id.row, sample_id.number)
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    max_tokens = recipe.rollout.response_tokens(len(prompt.token_ids))
    min_tokens = min(recipe.rollout.min_tokens, max_tokens)
    rollout = recipe.rollout
    return Request(
        key,
        prompt.token_ids,
        seed,
        max_tokens,
        temperature,
        stop=tuple(rollout.stop),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_tokens=min_tokens,
        id=sample_id,
        pictures=prompt.pictures,
    )
