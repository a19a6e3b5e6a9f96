"""What a model's ranks are asked to do, and what they reply. Plain values, which a lost group of ranks can be given again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.service.losses import LOSSES
from rlhfless_ray.service.wire import ClientMistake, PassesRequest


@dataclass(frozen=True)
class TokenPasses:
    """Passes over sequences, which add gradients if they learn.

    `batch` has each sequence's first token as prompt, so every target has a place. `inputs` (Σ tokens,) by name, with `target_tokens`.
    """

    batch: Batch
    inputs: Mapping[str, np.ndarray]
    loss: str
    config: Mapping[str, float]
    learns: bool


@dataclass(frozen=True)
class AdamStep:
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True)
class PassesDone:
    """`logprobs` (Σ tokens,) float32 of the targets. `loss`: the sum over all tokens."""

    logprobs: np.ndarray
    loss: float


def passes_of(request: PassesRequest, vocabulary: int, longest: int) -> TokenPasses:
    """Check a request's data, and lay its sequences end to end. Raises ClientMistake."""
    loss = LOSSES.get(request.loss)
    if loss is None:
        raise ClientMistake(f"loss_fn: {request.loss!r} is not served, only {', '.join(LOSSES)}")
    if unknown := sorted(set(request.config) - set(loss.config)):
        raise ClientMistake(f"loss_fn_config.{unknown[0]}: {request.loss} has no such setting")
    needed = ("target_tokens", *loss.inputs)
    sequences = []
    for number, datum in enumerate(request.data):
        where, tokens = f"data[{number}]", datum.tokens
        given = dict(datum.inputs)
        if "weights" not in given and "weights" in needed:
            given["weights"] = np.ones(len(tokens), np.float32)
        if missing := [name for name in needed if name not in given]:
            raise ClientMistake(f"{where}.loss_fn_inputs.{missing[0]}: {request.loss} needs it")
        if unread := sorted(name for name in given if name not in needed and name != "mask"):
            raise ClientMistake(f"{where}.loss_fn_inputs.{unread[0]}: {request.loss} does not read it")
        if len(tokens) > longest:
            raise ClientMistake(f"{where}.model_input: has {len(tokens)} tokens, more than the {longest} of the model's context")
        for name, ids in (("model_input", tokens), ("loss_fn_inputs.target_tokens", given["target_tokens"])):
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise ClientMistake(f"{where}.{name}: has a token outside of the vocabulary of {vocabulary}")
        sequences.append((tokens, given))
    batch = Batch.of(
        [
            ((int(tokens[0]),), np.append(tokens[1:], given["target_tokens"][-1]), np.zeros(len(tokens), np.float32), 0.0, number)
            for number, (tokens, given) in enumerate(sequences)
        ]
    )
    inputs = {
        name: np.concatenate([given[name] for _, given in sequences]).astype(np.int64 if name == "target_tokens" else np.float32)
        for name in needed
    }
    return TokenPasses(batch, inputs, request.loss, {**loss.config, **request.config}, not request.forward_only)
