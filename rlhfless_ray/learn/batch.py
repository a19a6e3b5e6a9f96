"""A step's samples as flat arrays, and their cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfless_ray.types import Sample

if TYPE_CHECKING:
    from rlhfless_ray.recipe import AlgorithmConfig


@dataclass(frozen=True)
class Batch:
    """Sequences of prompt and response, laid end to end. All arrays are numpy, so the object store shares them.

    tokens (Σ length,) int64; prompt_lengths and lengths (n,) int64, `lengths` with the response; groups (n,) int64, the
    prompt's position. mask (Σ (length - prompt length),) bool: which tokens after the prompts the policy wrote; None: all. Only
    these are learned from, the others are context. Per token of the policy, (Σ response length,) float32: logprobs of the
    sampler; advantages; and, None if they are not needed or not known yet, `old`: log-probabilities of the learner
    before the step, `reference`: of the policy that the run began with, `values`: the critic's, `returns`: what it is to learn;
    `lags` (int8): updates since the version that drew the token, in runs with a lag.
    `kl_coefficient`: of this step, where it is not the recipe's. `steps`: sequence indices of each optimizer step, where they do not
    follow from the recipe's section `algorithm` alone (see `carry.py`); an index may come again in another step.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    groups: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    old: np.ndarray | None = None
    reference: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    lags: np.ndarray | None = None
    kl_coefficient: float | None = None
    mask: np.ndarray | None = None
    steps: tuple[np.ndarray, ...] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def response_lengths(self) -> np.ndarray:
        """(n,) tokens of each sequence that the policy wrote."""
        if self.mask is None:
            return self.lengths - self.prompt_lengths
        return counts_of(self.mask, self.lengths - self.prompt_lengths)

    @classmethod
    def of(
        cls,
        sequences: list[tuple[tuple[int, ...], np.ndarray, np.ndarray, float | np.ndarray, int]],
        masks: list[np.ndarray | None] | None = None,
    ) -> Batch:
        """From (prompt ids, response ids, response log-probabilities, advantage, group) per sequence. The advantage is one per
        token, or one for all of them. `masks`: of the response tokens, where some of them are not the policy's."""
        prompts = {id(s[0]): np.asarray(s[0], np.int64) for s in sequences}  # one for all responses to it
        parts = [piece for prompt, response, *_ in sequences for piece in (prompts[id(prompt)], response)]
        advantages = [s[3] if isinstance(s[3], np.ndarray) else np.full(len(s[1]), s[3]) for s in sequences]
        logprobs = [s[2] for s in sequences]
        mask = mask_of(masks or [], [len(s[1]) for s in sequences])
        if mask is not None and masks is not None:
            chosen = [slice(None) if one is None else one for one in masks]
            logprobs, advantages = ([x[one] for x, one in zip(xs, chosen, strict=True)] for xs in (logprobs, advantages))
        return cls(
            tokens=np.concatenate(parts or [np.empty(0)]).astype(np.int64),
            prompt_lengths=np.array([len(s[0]) for s in sequences], np.int64),
            lengths=np.array([len(s[0]) + len(s[1]) for s in sequences], np.int64),
            groups=np.array([s[4] for s in sequences], np.int64),
            logprobs=np.concatenate(logprobs or [np.empty(0)]).astype(np.float32),
            advantages=np.concatenate(advantages or [np.empty(0)]).astype(np.float32),
            mask=mask,
        )

    def take(self, indices: np.ndarray) -> Batch:
        """The sequences with these indices, in that order."""

        def pieces(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            ends = np.cumsum(lengths)
            return np.concatenate([values[:0], *(values[ends[i] - lengths[i] : ends[i]] for i in indices)])

        by_token = {name: getattr(self, name) for name in ("logprobs", "advantages", "old", "reference", "values", "returns", "lags")}
        taken: dict[str, Any] = {name: None if x is None else pieces(x, self.response_lengths) for name, x in by_token.items()}
        return replace(
            self,
            tokens=pieces(self.tokens, self.lengths),
            prompt_lengths=self.prompt_lengths[indices],
            lengths=self.lengths[indices],
            groups=self.groups[indices],
            steps=None,
            **taken,
            mask=None if self.mask is None else pieces(self.mask, self.lengths - self.prompt_lengths),
        )


def batch_of(samples: Sequence[Sample], per_prompt: int) -> Batch:
    """Of a step's samples, `per_prompt` to each prompt; advantages are 0."""
    return Batch.of(
        [(s.prompt.token_ids, s.completion.token_ids, s.completion.logprobs, 0.0, s.completion.key // per_prompt) for s in samples],
        [s.action_mask for s in samples],
    )


def lags_of(samples: Sequence[Sample], newest: int) -> np.ndarray:
    """Return the updates between the version that drew a token and version `newest`, of all tokens that the policy wrote:
    (Σ response length,) int8."""
    lags = [np.repeat(newest - versions, tokens) for versions, tokens in (np.array(s.completion.versions).T for s in samples)]
    parts = [x if s.action_mask is None else x[s.action_mask] for x, s in zip(lags, samples, strict=True)]
    return np.concatenate([np.empty(0, np.int8), *parts]).astype(np.int8)


def mask_of(masks: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """Of all sequences, (Σ length,) bool, from those of each; None where none has one: every token counts."""
    if all(mask is None for mask in masks):
        return None
    parts = [np.ones(n, bool) if mask is None else np.asarray(mask, bool) for mask, n in zip(masks, lengths, strict=True)]
    return np.concatenate(parts)


def counts_of(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(sequences,) int64: tokens of each that the mask keeps; mask (Σ length,)."""
    before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    ends = np.cumsum(lengths)
    return before[ends] - before[ends - lengths]


def spans_of(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(sequences,) int64: tokens of each from the first that the mask keeps to the last, both included; mask (Σ length,)."""
    kept = (np.flatnonzero(part) for part in np.split(mask, np.cumsum(lengths)[:-1]))
    return np.array([where[-1] - where[0] + 1 if len(where) else 0 for where in kept], np.int64)


def mini_batches(batch: Batch, count: int, samples: int | None = None, rng: np.random.Generator | None = None) -> list[np.ndarray]:
    """Sequence indices of each optimizer step: whole groups, dealt in order to `count` of them; or, with `samples`, so many
    sequences each, in an order drawn from `rng` (the last may have fewer)."""
    if samples is not None:
        assert rng is not None
        order = rng.permutation(len(batch))
        return [np.sort(order[start : start + samples]) for start in range(0, len(order), samples)]
    order = np.unique(batch.groups)
    return [np.flatnonzero(np.isin(batch.groups, part)) for part in np.array_split(order, count) if len(part)]


def optimizer_steps(batch: Batch, algorithm: AlgorithmConfig, seed: list[int]) -> list[np.ndarray]:
    """Sequence indices of each optimizer step of an update, as the recipe's section `algorithm` says. The same on every rank;
    what is drawn follows from the seed. There may be none, where the samples fill no step."""
    if batch.steps is not None:
        return list(batch.steps)
    size, drops = algorithm.batch_samples, algorithm.remainder == "drop"
    rng = np.random.default_rng(seed)
    parts: list[np.ndarray] = []
    for _ in range(algorithm.epochs):
        parts += mini_batches(batch, algorithm.updates_per_step, size, rng)
    return [part for part in parts if len(part) == size] if drops else parts
