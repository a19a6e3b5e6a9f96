"""OpenRLHF's reward functions: lists of queries, prompts and labels in; rewards, scores and logged values out.

Two results are accepted: a list or tensor of rewards (OpenRLHF 0.8.0 to 0.8.2), or a dict with `rewards`, `scores` (for
dynamic filtering, default: the rewards) and `extra_logs` (name → one value, or one per query).
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.reward.source import Decode, Score, Source, Worker
from rlhfless_ray.reward.time_limit import TimeLimit, TimeLimitExceeded
from rlhfless_ray.reward.user_file import UserFile, read_function
from rlhfless_ray.reward.values import describe_exception, timeout_message, to_finite_float, to_float, unwrap
from rlhfless_ray.types import Sample

CONTRACT = "def {name}(queries, prompts, labels, **kwargs)"
KEYS = ("rewards", "scores", "extra_logs")

Query = tuple[int, str, str, Any]  # key, prompt and response with special tokens, prompt, label


class BadReturn(Exception):
    """The result violates the contract. The message continues the sentence "… returned "."""


@dataclass(frozen=True)
class QuerySource(Source):
    """A file's function, called with lists of up to `batch_samples` elements. OpenRLHF from 0.9.1 on passes one element."""

    file: UserFile
    name: str
    label_column: str
    batch_samples: int = 1

    def item(self, key: int, sample: Sample, decode: Decode) -> Query:
        return query_of(key, sample, decode, self.label_column)

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        return QueryWorker(self, timeout_s)

    def call_s(self, timeout_s: float) -> float:
        """Return the worst case in seconds: a failed batch is scored again one by one."""
        return timeout_s * (2 * self.batch_samples if self.batch_samples > 1 else 1)

    @classmethod
    def load(cls, path: str, name: str, label_column: str, batch_samples: int) -> QuerySource:
        """Run the file's top-level code once and check the function. Raises UserError as `load_reward` does."""
        return cls(read_function(path, name, CONTRACT.format(name=name), ([], [], [])), name, label_column, batch_samples)


def query_of(key: int, sample: Sample, decode: Decode, label_column: str) -> Query:
    """Build a query: prompt and response decoded in one go with special tokens, the prompt's text, and the row's label or ""."""
    text = decode([*sample.prompt.token_ids, *sample.completion.token_ids.tolist()])
    return key, text, sample.prompt.text, sample.prompt.row.get(label_column, "") if label_column else ""


class QueryWorker(Worker):
    """Score queries in a process's main thread. A batch that fails is split, so that the sample at fault can be named."""

    def __init__(self, source: QuerySource, timeout_s: float) -> None:
        self.source, self.timeout_s, self.batch_samples = source, timeout_s, source.batch_samples
        self.function = getattr(source.file.module(), source.name)
        self.limit = TimeLimit()

    def score(self, items: list[Query], budget_s: float = math.inf) -> list[Score]:
        """Return scores of the items, or of the first ones if `budget_s` is over.

        A sample gets a Score with an error if the function, called for it alone, raises, takes longer than `timeout_s`, or
        does not return a finite number.
        """
        end = time.monotonic() + budget_s
        scores: list[Score] = []
        alone_until = 0  # end of the batch that failed
        with self.limit.listening():
            while len(scores) < len(items):
                done = len(scores)
                batch = items[done : done + (1 if done < alone_until else self.batch_samples)]
                result = self._score(batch)
                if isinstance(result, list):
                    scores += result
                elif len(batch) == 1:
                    scores.append(Score(batch[0][0], None, result))
                else:
                    alone_until = done + len(batch)
                    continue
                if time.monotonic() >= end and done >= alone_until - 1:
                    break
        return scores

    def _score(self, batch: list[Query]) -> list[Score] | str:
        """Return the scores, or an error message for the whole call."""
        keys, queries, prompts, labels = (list(part) for part in zip(*batch, strict=True))
        labels = [deepcopy(label) for label in labels]  # all responses to a prompt have the same one, which the function may change
        try:
            value = self.limit.call(self.timeout_s * len(batch), self.function, queries, prompts, labels)
            return scores_of(value, keys, f"`{self.source.name}`")
        except TimeLimitExceeded:
            return timeout_message(self.timeout_s)
        except BadReturn as error:
            return f"`{self.source.name}` returned {error}"
        except (Exception, SystemExit) as error:
            return describe_exception(error, self.source.file)


def scores_of(value: object, keys: list[int], who: str) -> list[Score]:
    """Convert either form of result to scores, one per key.

    A reward that is not a finite number becomes the error of its sample. Raises BadReturn for wrong keys, lengths or types.
    """
    parts = dict(value) if isinstance(value, Mapping) else {"rewards": value}
    unknown = [key for key in parts if key not in KEYS]
    meant = [(key, close[0]) for key in unknown if (close := difflib.get_close_matches(str(key), KEYS, 1, 0.75))]
    meant = [(key, known) for key, known in meant if known not in parts]
    if meant:
        raise BadReturn(f"a dict with the key `{meant[0][0]}`: write `{meant[0][1]}`")
    if parts.get("rewards") is None:
        shown = f"a dict without `rewards` (its keys: {', '.join(f'`{key}`' for key in parts) or 'none'})"
        raise BadReturn(shown if isinstance(value, Mapping) else f"{type(value).__name__}, neither rewards nor a dict with `rewards`")
    rewards = per_sample(parts["rewards"], len(keys), "rewards")
    scores = None if parts.get("scores") is None else per_sample(parts["scores"], len(keys), "scores")
    logs = parts.get("extra_logs")
    if logs is not None and not isinstance(logs, Mapping):
        raise BadReturn(f"`extra_logs` of type {type(logs).__name__}, not a dict of name → values")
    columns = {str(name): per_sample(values, len(keys), f"extra_logs[{name!r}]", one_for_all=True) for name, values in (logs or {}).items()}
    return [
        _score(key, rewards[i], None if scores is None else scores[i], {n: column[i] for n, column in columns.items()}, who)
        for i, key in enumerate(keys)
    ]


def _score(key: int, reward: object, score: object, logs: JsonObject, who: str) -> Score:
    try:
        made = Score(key, to_finite_float(reward))
    except ValueError as error:
        return Score(key, None, f"{who} returned {error}")
    try:
        return replace(made, score=None if score is None else to_finite_float(score), extra_logs={n: to_float(v) for n, v in logs.items()})
    except ValueError as error:
        return Score(key, None, f"{who} returned, in `scores` or `extra_logs`, {error}")


def per_sample(values: object, count: int, name: str, one_for_all: bool = False) -> list[Any]:
    """Convert a list, array or tensor with `count` elements to a flat list.

    A single value is accepted for one sample, or for all of them with `one_for_all`.
    """
    if hasattr(values, "tolist"):  # numpy arrays and torch tensors on any device, without importing either
        values = values.tolist()
    if isinstance(values, (str, bytes)):
        raise BadReturn(f"`{name}` of type {type(values).__name__}, not numbers")
    if not isinstance(values, (list, tuple)):
        values = [values]
        if count > 1 and not one_for_all:
            raise BadReturn(f"one value as `{name}` for {count} queries")
    flat = [unwrap(value) for value in values]
    if one_for_all and len(flat) == 1:
        flat *= count
    if len(flat) != count:
        raise BadReturn(f"{len(flat)} values in `{name}` for {count} {'query' if count == 1 else 'queries'}")
    return flat
