"""A step's samples as flat arrays, and their division into optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfless_ray.types import PromptImage, Sample, SampleId

if TYPE_CHECKING:
    from rlhfless_ray.recipe import AlgorithmConfig

UNKNOWN_EXPERT = 255  # stands in `Batch.experts` for a choice that is not known


@dataclass(frozen=True)
class Batch:
    """n sequences of prompt and response, end to end. All arrays are numpy, so the object store shares them.

    Attributes:
        tokens: (Σ length,) int64.
        prompt_lengths, lengths: (n,) int64, in tokens; `lengths` includes the response.
        groups: (n,) int64, position of the sequence's prompt in the step.
        mask: (Σ (length - prompt length),) bool: which tokens after the prompts the policy wrote. None: all. Only these are trained
            on; the others are context.
        logprobs, advantages: (Σ response length,) float32, of the policy's tokens; `logprobs` are the sampler's.
        old, reference: (Σ response length,) float32 log-probabilities of the learner before the step, and of the initial policy.
            None: not needed, or not known yet.
        values, returns: (Σ response length,) float32, the critic's values and its targets. None: as above.
        lags: (Σ response length,) int8, updates since the version that drew the token, in runs with a lag.
        kl_coefficient: of this step, if it is not the recipe's.
        experts: (Σ length, routers, experts per token) uint8, the experts that the sampler's routers chose for each token. None: the
            learner's routers choose.
        pictures: the images of each sequence's prompt, as references. None: no prompt has any.
        steps: sequence indices of each optimizer step, if they do not follow from the recipe's section `algorithm` alone (see
            `carry.py`). An index may occur in several steps.
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
    experts: np.ndarray | None = None
    pictures: tuple[tuple[PromptImage, ...], ...] | None = None
    steps: tuple[np.ndarray, ...] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def response_lengths(self) -> np.ndarray:
        """(n,) number of tokens of each sequence that the policy wrote."""
        if self.mask is None:
            return self.lengths - self.prompt_lengths
        return counts_of(self.mask, self.lengths - self.prompt_lengths)

    @classmethod
    def of(
        cls,
        sequences: list[tuple[tuple[int, ...], np.ndarray, np.ndarray, float | np.ndarray, int]],
        masks: list[np.ndarray | None] | None = None,
        experts: Sequence[np.ndarray | None] = (),
        pictures: Sequence[tuple[PromptImage, ...]] = (),
    ) -> Batch:
        """Build a batch from (prompt ids, response ids, response log-probabilities, advantage, group) of each sequence.

        The advantage is one value per token, or one for all of them. `masks`: of the response tokens, if some are not the policy's.
        `experts`: `Completion.experts` of each sequence, if some have them. `pictures`: `Prompt.pictures` of each sequence.
        """
        prompts = {id(s[0]): np.asarray(s[0], np.int64) for s in sequences}  # one for all responses to it
        parts = [piece for prompt, response, *_ in sequences for piece in (prompts[id(prompt)], response)]
        sizes, advantages = [len(s[1]) for s in sequences], list[np.ndarray]()
        logprobs, given = [s[2] for s in sequences], [s[3] for s in sequences]
        if any(isinstance(one, np.ndarray) for one in given):
            advantages = [np.broadcast_to(np.asarray(one, np.float32), n) for one, n in zip(given, sizes, strict=True)]
        else:
            advantages = [np.repeat(np.array(given, np.float32), np.array(sizes, int))]
        mask = mask_of(masks or [], sizes)
        if mask is not None and masks is not None:
            chosen = [slice(None) if one is None else one for one in masks]
            logprobs = [x[one] for x, one in zip(logprobs, chosen, strict=True)]
            advantages = [np.concatenate(advantages)[mask]]
        lengths = [len(s[0]) + n for s, n in zip(sequences, sizes, strict=True)]
        return cls(
            tokens=np.concatenate(parts or [np.empty(0)], dtype=np.int64, casting="unsafe"),
            prompt_lengths=np.array([len(s[0]) for s in sequences], np.int64),
            lengths=np.array(lengths, np.int64),
            groups=np.array([s[4] for s in sequences], np.int64),
            logprobs=np.concatenate(logprobs or [np.empty(0)], dtype=np.float32, casting="unsafe"),
            advantages=np.concatenate(advantages or [np.empty(0)], dtype=np.float32, casting="unsafe"),
            mask=mask,
            experts=experts_of(experts, lengths),
            pictures=tuple(pictures) if any(pictures) else None,
        )

    def take(self, indices: np.ndarray) -> Batch:
        """Return a batch of the sequences with these indices, in that order."""

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
            experts=None if self.experts is None else pieces(self.experts, self.lengths),
            pictures=None if self.pictures is None else tuple(self.pictures[i] for i in indices),
        )


def batch_of(samples: Sequence[Sample], per_prompt: int) -> Batch:
    """Build a batch from a step's samples, `per_prompt` for each prompt. Advantages are 0."""
    groups: dict[SampleId, int] = {}
    numbers = [groups.setdefault(s.id.group(per_prompt), len(groups)) for s in samples]
    return Batch.of(
        [(s.prompt.token_ids, s.completion.token_ids, s.completion.logprobs, 0.0, n) for s, n in zip(samples, numbers, strict=True)],
        [s.action_mask for s in samples],
        [s.completion.experts for s in samples],
        [s.prompt.pictures for s in samples],
    )


def lags_of(samples: Sequence[Sample], newest: int) -> np.ndarray:
    """Return the updates between each token's weight version and version `newest`, (Σ response length,) int8."""
    versions, tokens = np.array([part for s in samples for part in s.completion.versions], np.int64).reshape(-1, 2).T
    lags = np.repeat((newest - versions).astype(np.int8), tokens)
    mask = mask_of([s.action_mask for s in samples], [len(s.completion.token_ids) for s in samples])
    return lags if mask is None else lags[mask]


def mask_of(masks: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """Join the masks of all sequences to (Σ length,) bool. Returns None if no sequence has a mask: every token counts."""
    if all(mask is None for mask in masks):
        return None
    parts = [np.ones(n, bool) if mask is None else np.asarray(mask, bool) for mask, n in zip(masks, lengths, strict=True)]
    return np.concatenate(parts)


def experts_of(experts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """Join the experts of all sequences to (Σ length, routers, experts per token). Returns None if no sequence has any.

    Tokens beyond those of a sequence's array are unknown: its last one, which no engine computes, and all of a sequence without an array.
    """
    shape = next((one.shape[1:] for one in experts if one is not None), None)
    if shape is None:
        return None
    whole = np.full((sum(lengths), *shape), UNKNOWN_EXPERT, np.uint8)
    for one, length, end in zip(experts, lengths, np.cumsum(lengths), strict=True):
        if one is not None:
            known = one[:length]
            whole[end - length : end - length + len(known)] = known
    return whole


def counts_of(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each sequence that the mask keeps, (sequences,) int64. `mask` (Σ length,)."""
    before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    ends = np.cumsum(lengths)
    return before[ends] - before[ends - lengths]


def spans_of(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the tokens from the first to the last that the mask keeps, both included, (sequences,) int64. `mask` (Σ length,)."""
    kept = (np.flatnonzero(part) for part in np.split(mask, np.cumsum(lengths)[:-1]))
    return np.array([where[-1] - where[0] + 1 if len(where) else 0 for where in kept], np.int64)


def optimizer_steps(batch: Batch, algorithm: AlgorithmConfig, seed: list[int]) -> list[np.ndarray]:
    """Return the sequence indices of each optimizer step of an update, by the recipe's section `algorithm`.

    Whole groups are dealt in order to `updates_per_step` steps. With `batch_samples`, each step has that many sequences instead, in an
    order drawn from the seed, and the last step of an epoch may have fewer. The result is the same on every rank, and empty if the
    samples fill no step.
    """
    if batch.steps is not None:
        return list(batch.steps)
    size, rng = algorithm.batch_samples, np.random.default_rng(seed)
    if size is None:
        parts = np.array_split(np.unique(batch.groups), algorithm.updates_per_step)
        return [np.flatnonzero(np.isin(batch.groups, part)) for part in parts if len(part)] * algorithm.epochs
    orders = [rng.permutation(len(batch)) for _ in range(algorithm.epochs)]
    steps = [np.sort(order[start : start + size]) for order in orders for start in range(0, len(order), size)]
    return [step for step in steps if len(step) == size] if algorithm.remainder == "drop" else steps
