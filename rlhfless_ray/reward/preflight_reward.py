"""Check a reward source before the first step.

A function is called once in a separate process, so that a violated contract is reported at once instead of after an hour. At least one
HTTP server must accept a connection.
"""

from __future__ import annotations

import socket
import time
import urllib.parse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.local.isolated_call import call_begins, isolated_main, run_isolated
from rlhfless_ray.reward.http_reward import HttpSource
from rlhfless_ray.reward.openrlhf_reward import QuerySource
from rlhfless_ray.reward.reward_functions import RewardSource
from rlhfless_ray.reward.source import Score, item_factory
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SERVER_S = 30.0  # wait for a server that the same script has just started
CONNECT_S, POLL_S = 5.0, 0.5
SLACK_S = 5.0  # for a call that returns just in time, on a machine that is busy with other work


def dry_call(source: object, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, timeout_s: float, label_column: str = "") -> None:
    """Score made-up responses to the first prompts: empty ones and the labels themselves.

    Raises UserError if the function of a file fails for all of them, hangs or ends its process, or if no server of an HTTP source accepts
    a connection. A function may fail for some of them for a good reason. Other sources are not called. `label_column`: name of the
    data column with labels, for a function that scores one sample.
    """
    if isinstance(source, HttpSource):
        find_server(source.urls, min(SERVER_S, source.deadline_s))
    if not isinstance(source, (QuerySource, RewardSource)) or source.file is None:
        return
    where = f"reward.function {source.file.path}:{source.name}"
    items = _items(source, prompts, tokenizer) if isinstance(source, QuerySource) else _row_items(prompts, label_column)
    limit_s = 2 * timeout_s * (len(items) if isinstance(source, QuerySource) else 1) + SLACK_S
    scores: list[Score] = run_isolated(__name__, (source, items, timeout_s), limit_s, where, "a dry call", "return")
    if all(score.error is not None for score in scores):
        raise UserError(f"{where}: it fails in a dry call with made-up responses: {scores[0].error}")


def check_references(source: object, prompts: Sequence[Prompt]) -> str | None:
    """Return a note on references that `math` compares only as text. Raises UserError for a prompt without one that it can read."""
    if not isinstance(source, RewardSource) or source.kind != "math":
        return None
    from rlhfless_ray.reward.math_answer import is_reference_understood

    as_text = []
    for prompt in prompts:
        try:
            if not is_reference_understood(prompt.row, source.answer_column):
                as_text.append(prompt)
        except ValueError as error:
            end = prompt.text[-80:]  # with a chat template all begin alike
            raise UserError(f"reward.function: `math` cannot score prompt {end!r}: {error}; fix or remove the row") from None
    if not as_text:
        return None
    first = str(as_text[0].row[source.answer_column])[-80:]
    return f"reward.function: `math` compares {len(as_text)} of {len(prompts)} reference answers only as text; the first is {first!r}"


def find_server(urls: Sequence[str], within_s: float) -> None:
    """Wait until one of the addresses accepts a connection.

    Raises UserError, naming them, after `within_s` seconds, or at once if no host name is known.
    """
    end = time.monotonic() + within_s
    while True:
        errors: list[OSError] = []
        for url in urls:
            parts = urllib.parse.urlsplit(url)
            try:
                socket.create_connection((parts.hostname, parts.port or {"https": 443}.get(parts.scheme, 80)), CONNECT_S).close()
                return
            except OSError as error:
                errors.append(error)
        is_unknown_host = [isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN for error in errors]
        if time.monotonic() >= end or all(is_unknown_host):
            failures = ", ".join(f"{url} ({error.strerror or error})" for url, error in zip(urls, errors, strict=True))
            raise UserError(f"reward.url: there is no server at {failures}; start it first, or correct the address")
        time.sleep(POLL_S)


def _items(source: QuerySource, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    items, make_item = [], item_factory(source, tokenizer)
    for key in range(max(2, source.batch_samples)):
        prompt = prompts[key % len(prompts)]
        label = str(prompt.row.get(source.label_column, "")) if key % 2 and source.label_column else ""
        tokens = np.array(tokenizer(label, add_special_tokens=False)["input_ids"] if label else [], np.int32)
        completion = Completion(key, tokens, np.zeros(len(tokens), np.float32), "stop", 0)
        items.append(make_item(key, Sample(prompt, SampleId(prompt.index, 0, key), completion)))
    return items


def _row_items(prompts: list[Prompt], label_column: str) -> list[tuple[int, str, str, JsonObject]]:
    """Return what a function for one sample gets: an empty response to the first prompt, and its label, or else the prompt's own text."""
    prompt = prompts[0]
    label = prompt.row.get(label_column) if label_column else None
    responses = ["", prompt.text if label is None else str(label)]
    return [(key, prompt.text, response, dict(prompt.row)) for key, response in enumerate(responses)]


def _scores(source: Any, items: list[Any], timeout_s: float) -> list[Score]:
    worker, scores = source.worker(timeout_s), list[Score]()
    for part in [items] if isinstance(source, QuerySource) else [[item] for item in items]:
        call_begins()
        scores += worker.score(part)
    return scores


if __name__ == "__main__":
    isolated_main(_scores)
