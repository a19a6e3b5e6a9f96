"""Tool calls in a policy's reply, in the forms of Hermes and Qwen, Mistral, and Llama 3."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from rlhfless_ray.common.json_types import JsonObject

HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
MISTRAL, LLAMA = "[TOOL_CALLS]", "<|python_tag|>"


def reply_message(text: str, tools: list[JsonObject]) -> JsonObject:
    """Return a reply as a message of the assistant. A call that is not well-formed, or without `tools`, stays text."""
    content, calls = _calls_in(text) if tools else (text, [])
    message: JsonObject = {"role": "assistant", "content": content or None if calls else text}
    if calls:
        message["tool_calls"] = [
            {"id": secrets.token_hex(5)[:9], "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ]
    return message


def _calls_in(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text before the calls, and their names and arguments. No calls if one of them is not well-formed."""
    if found := HERMES.findall(text):
        before, bodies = text[: text.index("<tool_call>")], found
    elif MISTRAL in text:
        before, _, body = text.partition(MISTRAL)
        bodies = [body]
    else:
        before, bodies = "", [text.strip().removeprefix(LLAMA)]
    try:
        values = [json.loads(body) for body in bodies]
    except (ValueError, RecursionError):
        return text, []
    calls = []
    for value in (inner for outer in values for inner in (outer if isinstance(outer, list) else [outer])):
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return text, []
        calls.append((value["name"], value.get("arguments", value.get("parameters", {}))))
    return before.strip(), calls
