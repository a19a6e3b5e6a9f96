"""vLLM's engine interface for agent files, over any function that generates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class PolicyReply:
    """The policy's reply to a context."""

    token_ids: list[int]
    text: str  # with special tokens
    logprobs: list[float]  # of each token, under the sampling distribution
    finish_reason: str  # "stop" or "length"


Generate = Callable[[list[int], Any], Awaitable[PolicyReply]]  # context, sampling parameters


class AgentEngine:
    """An engine whose `generate` returns vLLM's output: to be awaited or, as before OpenRLHF 0.9.1, iterated over."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def generate(self, prompt: Any, sampling_params: Any, request_id: str = "", multi_modal_data: Any = None) -> Answer:
        """Generate a response. `prompt`: token ids, or a dict with `prompt_token_ids`."""
        if multi_modal_data:
            raise ValueError("images are not supported by this runtime")
        tokens = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        return Answer(self._generate, [int(token) for token in tokens], sampling_params)


class Answer:
    def __init__(self, generate: Generate, tokens: list[int], sampling_params: object) -> None:
        self._request = generate, tokens, sampling_params

    async def _generate_answer(self) -> Any:
        generate, tokens, sampling_params = self._request
        reply = await generate(tokens, sampling_params)
        logprobs = [{token: SimpleNamespace(logprob=logprob)} for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)]
        output = SimpleNamespace(
            token_ids=list(reply.token_ids), text=reply.text, finish_reason=reply.finish_reason, logprobs=logprobs, index=0
        )
        return SimpleNamespace(prompt_token_ids=tokens, outputs=[output], finished=True)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._generate_answer().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield await self._generate_answer()
