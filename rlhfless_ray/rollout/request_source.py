"""Requests that are all known when a rollout begins: each is one response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlhfless_ray.rollout.events import SamplesMade
from rlhfless_ray.rollout.live_rollout import RequestSource
from rlhfless_ray.rollout.samples import ResponseSamples
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import Completion, Prompt, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class WantedResponses:
    """The responses that a rollout generates.

    Attributes:
        requests: with keys 0 … n - 1.
        prompts: of all requests, in any order.
        expected: (n,) forecast tokens of whole responses.
        version: of the weights.
        before: responses of earlier rollouts by key, finished or not.
        cuts: whether unfinished responses go on in the next step.
        keeps_kv: whether such a response keeps the KV of the weights under which it began.
    """

    requests: list[Request]
    prompts: list[Prompt]
    expected: np.ndarray
    version: int
    before: Mapping[int, Completion] = field(default_factory=dict)
    cuts: bool = False
    keeps_kv: bool = False


class PlainRequests(RequestSource):
    samples: ResponseSamples

    def __init__(self, tokenizer: PreTrainedTokenizerBase, wanted: WantedResponses) -> None:
        self.samples = ResponseSamples(wanted.requests, wanted.prompts, tokenizer)
        self.token_log = TokenLog(wanted.requests, wanted.before, wanted.keeps_kv, wanted.expected)
        self.total, self.version, self.ended = len(wanted.requests), wanted.version, self.token_log.completions

    def has_work(self) -> bool:
        return bool(self.rollout.calls.running)

    def awaited(self) -> str:
        return f"{self.token_log.missing} of {self.total} responses from {len(self.rollout.calls.running)} engines"

    def assign(self, number: int, share: np.ndarray) -> None:
        self.rollout.calls.send(number, share)

    def complete(self, keys: list[int]) -> None:
        self.rollout.emit(SamplesMade(self.samples.add(self.token_log.completions[key] for key in keys)))

    def left(self) -> np.ndarray:
        return self.token_log.left()

    def unfinished(self) -> list[Completion]:
        return self.token_log.unfinished(self.version)
