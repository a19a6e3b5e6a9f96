"""The routes' answers, in OpenAI's form and that of vLLM's token route."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response, StreamingResponse

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.door.conversation import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_answer(turn: Turn, message: JsonObject, body: JsonObject, tokenizer: PreTrainedTokenizerBase) -> Response:
    """Answer `/v1/chat/completions`. A stream has the whole reply in one part."""
    reason = "tool_calls" if "tool_calls" in message else turn.reply.finish_reason
    logprobs = {"content": _token_logprobs(turn, tokenizer)} if body.get("logprobs") else None
    head = _head("chatcmpl", body)
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": logprobs}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": _usage(turn)})
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    choices: list[JsonObject] = [
        {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs},
        {"index": 0, "delta": {}, "finish_reason": reason, "logprobs": None},
    ]
    return _stream({**head, "object": "chat.completion.chunk"}, choices, turn, body)


def text_answer(turn: Turn, body: JsonObject, tokenizer: PreTrainedTokenizerBase) -> Response:
    """Answer `/v1/completions`."""
    head, reply = {**_head("cmpl", body), "object": "text_completion"}, turn.reply
    logprobs = None
    if body.get("logprobs") is not None:
        texts = [_token_text(token, tokenizer) for token in reply.token_ids]
        logprobs = {"tokens": texts, "token_logprobs": reply.logprobs, "top_logprobs": None, "text_offset": None}
    choice = {"index": 0, "text": reply.text, "finish_reason": reply.finish_reason, "logprobs": logprobs}
    if body.get("stream"):
        return _stream(head, [choice], turn, body)
    return JSONResponse({**head, "choices": [choice], "usage": _usage(turn)})


def token_answer(turn: Turn, body: JsonObject) -> Response:
    """Answer `/inference/v1/generate`. Some clients read a token's number from `token`, others from `token_id`."""
    reply = turn.reply
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
    ]
    choice = {"index": 0, "token_ids": reply.token_ids, "finish_reason": reply.finish_reason, "logprobs": {"content": content}}
    answer = {
        "request_id": body.get("request_id") or f"gen-{secrets.token_hex(12)}",
        "model": body.get("model", ""),
        "created": int(time.time()),
    }
    return JSONResponse({**answer, "prompt_token_ids": turn.context, "choices": [choice], "usage": _usage(turn)})


def _head(kind: str, body: JsonObject) -> JsonObject:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.get("model", "")}


def _usage(turn: Turn) -> JsonObject:
    prompt, reply = len(turn.context), len(turn.reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def _token_text(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([token], skip_special_tokens=False))


def _token_logprobs(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> list[JsonObject]:
    texts = [_token_text(token, tokenizer) for token in turn.reply.token_ids]
    return [
        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        for text, logprob in zip(texts, turn.reply.logprobs, strict=True)
    ]


def _stream(head: JsonObject, choices: list[JsonObject], turn: Turn, body: JsonObject) -> Response:
    """Return server-sent events, one for each choice. Usage is sent if the body's `stream_options` want it."""
    events = [{**head, "choices": [choice]} for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": _usage(turn)})

    def lines() -> Iterator[str]:
        for event in events:
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
