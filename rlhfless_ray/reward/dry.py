"""A reward function is called once before the first step, in a process of its own, so that a run does not find out after an hour
that what it returns is not of the contract. Of HTTP servers one must be there."""

from __future__ import annotations

import socket
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhfless_ray.dry import answer, answer_of
from rlhfless_ray.errors import UserError
from rlhfless_ray.reward.http import HttpSource
from rlhfless_ray.reward.queries import QuerySource
from rlhfless_ray.reward.source import Score
from rlhfless_ray.types import Completion, Prompt, Sample

SERVER_S = 30.0  # for a server that the same script has just started
CONNECT_S, REST_S = 5.0, 0.5


def dry_call(source: Any, prompts: list[Prompt], tokenizer: Any, timeout_s: float) -> None:
    """Scores made-up responses to the first prompts: the empty one and the label itself. Raises UserError when the function
    fails for each of them, hangs or ends its process; one that fails for some may be right to; and when no server of an HTTP source
    takes a connection. Other sources need no call."""
    if isinstance(source, HttpSource):
        find_server(source.urls, min(SERVER_S, source.deadline_s))
    if not isinstance(source, QuerySource):
        return
    where = f"reward.function {source.file.path}:{source.name}"
    items = _items(source, prompts, tokenizer)
    limit_s = 2 * timeout_s * len(items)
    scores: list[Score] = answer_of(__name__, (source, items, timeout_s), limit_s, where, "a dry call", "return")
    if all(score.error is not None for score in scores):
        raise UserError(f"{where}: it fails in a dry call with made-up responses: {scores[0].error}")


def find_server(urls: Sequence[str], within_s: float) -> None:
    """Wait until one of the addresses takes a connection. Raises UserError, naming them, when none does in that time, and at once when
    none of them has a host that is known."""
    end = time.monotonic() + within_s
    while True:
        refused: list[OSError] = []
        for url in urls:
            parts = urllib.parse.urlsplit(url)
            try:
                socket.create_connection((parts.hostname, parts.port or {"https": 443}.get(parts.scheme, 80)), CONNECT_S).close()
                return
            except OSError as error:
                refused.append(error)
        unknown = [isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN for error in refused]
        if time.monotonic() >= end or all(unknown):
            told = ", ".join(f"{url} ({error.strerror or error})" for url, error in zip(urls, refused, strict=True))
            raise UserError(f"reward.url: there is no server at {told}; start it first, or correct the address")
        time.sleep(REST_S)


def _items(source: QuerySource, prompts: list[Prompt], tokenizer: Any) -> list[Any]:
    items = []
    for key in range(max(2, source.batch_samples)):
        prompt = prompts[key % len(prompts)]
        label = str(prompt.row.get(source.label_column, "")) if key % 2 and source.label_column else ""
        tokens = np.array(tokenizer(label, add_special_tokens=False)["input_ids"] if label else [], np.int32)
        completion = Completion(key, tokens, np.zeros(len(tokens), np.float32), "stop", 0)
        items.append(source.item(key, Sample(prompt, 0, completion), lambda ids: tokenizer.decode(ids, skip_special_tokens=False)))
    return items


def _scores(source: Any, items: list[Any], timeout_s: float) -> list[Score]:
    return source.worker(timeout_s).score(items)


if __name__ == "__main__":
    answer(_scores)
