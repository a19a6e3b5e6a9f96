"""What was said in a session, as token ids.

A request that repeats an earlier reply continues its tokens: what was sampled is never tokenized again. So the turns form a tree, each
under the turn whose context and reply begin its own context. A path from a root to a leaf is a branch, and each reply is trained in one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTINEL = "\ue000reply\ue000"  # stands for a reply where only the text after it is wanted; private characters


class BadRequest(Exception):
    """A request that is not understood. The message says why."""


@dataclass(frozen=True)
class Turn:
    """A reply of the policy to a context of token ids."""

    context: tuple[int, ...]
    reply: PolicyReply

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.context, *self.reply.token_ids)


@dataclass(frozen=True)
class Branch:
    """A path of turns as a sequence of `n` tokens that ends with a reply.

    Attributes:
        token_ids: (n,) int32.
        prompt_tokens: tokens before the first one that is trained.
        trained: (n,) bool, replies that are trained in this branch and in no other one.
        logprobs: (n,) float32, 0 where `trained` is False.
        turns: number of replies that are trained.
        is_truncated: whether the last reply reached a token limit.
    """

    token_ids: np.ndarray
    prompt_tokens: int
    trained: np.ndarray
    logprobs: np.ndarray
    turns: int
    is_truncated: bool


def branches_of(turns: Sequence[Turn]) -> list[Branch]:
    """Return the branches of turns that are in the order of their replies, by their last turn. A shared reply is trained in the first."""
    parents = [_parent(turns, number) for number in range(len(turns))]
    is_trained = [False] * len(turns)
    branches = []
    for leaf in sorted(set(range(len(turns))) - set(parents)):
        path, number = list[int](), leaf
        while number >= 0:
            path.append(number)
            number = parents[number]
        tokens = np.array(turns[leaf].token_ids, np.int32)
        trained, logprobs = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32)
        new = [number for number in path if not is_trained[number]]
        for number in new:
            is_trained[number] = True
            start, end = len(turns[number].context), len(turns[number].token_ids)
            trained[start:end], logprobs[start:end] = True, turns[number].reply.logprobs
        truncated = turns[leaf].reply.finish_reason == "length"
        branches.append(Branch(tokens, len(turns[new[-1]].context), trained, logprobs, len(new), truncated))
    return branches


def _parent(turns: Sequence[Turn], number: int) -> int:
    """Return the number of the longest earlier turn that begins a turn's context, or -1."""
    context = turns[number].context
    fits = (i for i in range(number) if context[: len(turns[i].token_ids)] == turns[i].token_ids)
    return max(fits, key=lambda i: len(turns[i].token_ids), default=-1)


class TurnTree:
    """Turns of one session, and what its requests are as token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.turns: list[Turn] = []
        self.by_messages: dict[bytes, Turn] = {}  # by digest of the messages up to the reply
        self.by_text: dict[str, Turn] = {}  # by prompt and reply

    # ---- contexts of requests -------------------------------------------------------------------------------------

    def chat_context(self, messages: list[JsonObject], tools: list[JsonObject]) -> list[int]:
        """Return the token ids of messages (see `read_messages`), with the beginning of the policy's reply."""
        digests = message_digests(messages, tools)
        for k in range(len(messages), 0, -1):
            if messages[k - 1]["role"] != "assistant" or digests[k] not in self.by_messages:
                continue
            replaced = [*messages[: k - 1], {"role": "assistant", "content": SENTINEL}, *messages[k:]]
            _, found, rest = self._render(replaced, tools).rpartition(SENTINEL)
            if found:  # a template may leave out old turns
                return self._continue(self.by_messages[digests[k]], rest)
        return self._tokens(self._render(messages, tools))

    def text_context(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt that is text."""
        seen = max((text for text in self.by_text if prompt.startswith(text)), key=len, default=None)
        return self._tokens(prompt) if seen is None else self._continue(self.by_text[seen], prompt[len(seen) :])

    def _continue(self, turn: Turn, text: str) -> list[int]:
        """Return a turn's tokens and those of the text after it. The token that ended the reply may begin this text: it is there once."""
        ids = turn.reply.token_ids
        if turn.reply.finish_reason == "stop" and ids:
            text = text.removeprefix(self.tokenizer.decode(ids[-1:], skip_special_tokens=False))
        return [*turn.token_ids, *self._tokens(text)]

    def _render(self, messages: list[JsonObject], tools: list[JsonObject]) -> str:
        if not self.tokenizer.chat_template:
            return "".join(message["content"] for message in messages)
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program, which may raise anything
            raise BadRequest(f"messages: the policy's chat template failed ({type(error).__name__}: {error})") from None
        return str(text)

    def _tokens(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]] if text else []

    # ---- what was said --------------------------------------------------------------------------------------------

    def add(self, context: list[int], reply: PolicyReply) -> Turn:
        self.turns.append(Turn(tuple(context), reply))
        return self.turns[-1]

    def remember_chat(self, turn: Turn, messages: list[JsonObject], tools: list[JsonObject], reply: JsonObject) -> None:
        """Recognise a reply when messages repeat it."""
        self.by_messages[message_digests([*messages, *read_messages([reply])], tools)[-1]] = turn

    def remember_text(self, turn: Turn, prompt: str) -> None:
        self.by_text[prompt + turn.reply.text] = turn


def read_messages(messages: object) -> list[JsonObject]:
    """Return messages as chat templates read them: `developer` is `system`, contents are text, and arguments of tool calls are dicts.

    Raises BadRequest, which names the message.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: expected a list with at least one message")
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _read_message(message: object, where: str) -> JsonObject:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}: expected an object with a role")
    role = "system" if message["role"] == "developer" else message["role"]
    read: JsonObject = {"role": role, "content": _content_text(message.get("content"), where)}
    read |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    if message.get("tool_calls"):
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls") for call in message["tool_calls"]]
    return read


def _content_text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"{where}.content: a part of type {kind} is not supported; send text")
    return "".join(part["text"] for part in parts)


def _read_call(call: object, where: str) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: expected objects with function.name and function.arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else a template writes the text as it is
            arguments = json.loads(arguments)
    return {"id": call.get("id", ""), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def message_digests(messages: list[JsonObject], tools: list[JsonObject]) -> list[bytes]:
    """Return a digest of the first 0, 1, … messages each. Ids of tool calls do not count: only the wire needs them."""
    digests = [_digest(b"", tools)]
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        digests.append(_digest(digests[-1], [message["role"], message["content"], message.get("name"), calls]))
    return digests


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
