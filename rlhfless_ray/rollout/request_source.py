"""Requests that are all known when a rollout begins: each is one response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhfless_ray.rollout.events import ResponsesEnded
from rlhfless_ray.rollout.listener import Samples
from rlhfless_ray.rollout.live_rollout import RequestSource
from rlhfless_ray.rollout.samples import ResponseSamples
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import Completion, Prompt, Request


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


def plain_responses(tokenizer: Any, wanted: WantedResponses) -> tuple[RequestSource, Samples]:
    """Return the source of a rollout whose responses are one request each, and its samples."""
    return PlainRequests(wanted), ResponseSamples(wanted.requests, wanted.prompts, tokenizer)


class PlainRequests(RequestSource):
    def __init__(self, wanted: WantedResponses) -> None:
        self.token_log = TokenLog(wanted.requests, wanted.before, wanted.keeps_kv, wanted.expected)
        self.total, self.version, self.ended = len(wanted.requests), wanted.version, self.token_log.completions

    def has_work(self) -> bool:
        return bool(self.rollout.calls.running)

    def awaited(self) -> str:
        return f"{self.token_log.missing} of {self.total} responses from {len(self.rollout.calls.running)} engines"

    def assign(self, number: int, share: np.ndarray) -> None:
        self.rollout.calls.send(number, share)

    def complete(self, keys: list[int]) -> None:
        self.rollout.emit(ResponsesEnded([self.token_log.completions[key] for key in keys]))

    def left(self) -> np.ndarray:
        return self.token_log.left()

    def unfinished(self) -> list[Completion]:
        return self.token_log.unfinished(self.version)
