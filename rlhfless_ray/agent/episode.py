"""A finished episode: its tokens, which of them the policy wrote, and its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlhfless_ray.reward.values import to_finite_float, to_float, unwrap

MAX_TOKEN_ID = np.iinfo(np.int32).max


class BadEpisode(Exception):
    """The agent's result violates the contract. The message says how."""


@dataclass(frozen=True)
class Episode:
    """Tokens (n,) int32: the first observation, then actions and feedback in turn, ending with an action.

    Feedback after the last action is dropped, because nothing is learned from it. The arrays `action` and `logprobs` cover
    the tokens after the first observation.
    """

    token_ids: np.ndarray
    prompt_tokens: int  # length of the first observation
    action: np.ndarray  # (n - prompt_tokens,) bool: True: written by the policy and trained on
    logprobs: np.ndarray | None  # (n - prompt_tokens,) float32, under the sampling distribution; 0 on feedback; None: unknown
    turns: int
    truncated: bool  # the last action reached a token limit
    reward: float
    score: float | None = None
    extra_logs: dict[str, float] = field(default_factory=dict)
    branches: tuple[Episode, ...] = ()  # further sequences, each with tokens of the policy that no other one has as actions

    @classmethod
    def of(cls, result: object) -> Episode:
        """Convert the dict that an executor's `execute` returns, in OpenRLHF's form. Raises BadEpisode naming what is wrong."""
        if not isinstance(result, Mapping):
            raise BadEpisode(f"`execute` returned {type(result).__name__}, not a dict")
        for key in ("observation_tokens", "action_ranges", "reward"):
            if result.get(key) is None:
                raise BadEpisode(f"`execute` returned a dict without `{key}` (its keys: {', '.join(f'`{k}`' for k in result)})")
        tokens = np.asarray(result["observation_tokens"], np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= MAX_TOKEN_ID:  # token ids are stored as int32
            raise BadEpisode(f"`observation_tokens` has {tokens[(tokens < 0) | (tokens > MAX_TOKEN_ID)][0]}, which is not a token id")
        ranges = [(int(start), int(end)) for start, end in result["action_ranges"]]
        _check(ranges, len(tokens))
        first, last = ranges[0][0], ranges[-1][1]
        action = np.zeros(last - first, bool)
        for start, end in ranges:
            action[start - first : end - first] = True
        logprobs = result.get("rollout_log_probs")
        if logprobs is not None:
            if len(logprobs) != len(tokens):
                raise BadEpisode(f"`rollout_log_probs` has {len(logprobs)} values for {len(tokens)} observation tokens")
            logprobs = np.where(action, np.asarray(logprobs, np.float32)[first:last], np.float32(0))
            if not np.isfinite(logprobs).all():  # one NaN would make the loss of the whole step NaN
                at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
                raise BadEpisode(f"`rollout_log_probs` has {logprobs[at]:g} for action token {first + at}")
        try:
            reward = to_finite_float(unwrap(result["reward"]))
            score = None if result.get("scores") is None else to_finite_float(unwrap(result["scores"]))
            logs = {str(name): to_float(unwrap(value)) for name, value in (result.get("extra_logs") or {}).items()}
        except ValueError as error:
            raise BadEpisode(f"`reward`, `scores` or `extra_logs` is {error}") from None
        return cls(
            tokens[:last].astype(np.int32), first, action, logprobs, len(ranges), bool(result.get("truncated", False)), reward, score, logs
        )


def _check(ranges: list[tuple[int, int]], tokens: int) -> None:
    if not ranges:
        raise BadEpisode("the policy wrote nothing: `action_ranges` is empty")
    before = 0
    for start, end in ranges:
        if not before <= start < end <= tokens:
            raise BadEpisode(f"`action_ranges` {ranges} must ascend without overlap within the {tokens} observation tokens")
        before = end
    if ranges[0][0] == 0:
        raise BadEpisode("the first action begins at token 0: there is no observation before it")
