"""The requests in one engine, and what was told of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhfless_ray.rollout.token_deltas import CUT, GOES_ON, TokenDeltas
from rlhfless_ray.types import Request


class SampledTokens(Protocol):
    """What is asked of the sampler (`KeyedSampler`); its keys are our numbers."""

    outputs: dict[int, list[int]]

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

    def forget(self, key: int) -> None: ...


@dataclass
class _Row:
    """told: tokens generated here that were told; ended: all that were, and how it ended."""

    request: Request
    told: int = 0
    ended: tuple[list[int], int] | None = None


class RunningRequests:
    """Each request has a number of its own, for its key may leave and come back while the engine still knows the old one."""

    def __init__(self, draws: SampledTokens) -> None:
        self.draws = draws
        self.rows: dict[int, _Row] = {}  # numbers ascend
        self.number: dict[int, int] = {}  # by key
        self.numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def decoding(self) -> int:
        """Requests that have not ended."""
        return sum(row.ended is None for row in self.rows.values())

    def take_up(self, request: Request) -> int:
        """Raises RuntimeError for a key that is at work already."""
        if request.key in self.number:
            raise RuntimeError(f"request {request.key} is at work in this engine already")
        number = next(self.numbers)
        self.rows[number], self.number[request.key] = _Row(request), number
        return number

    def end(self, number: int, token_ids: Iterable[int], end: int) -> None:
        """All tokens that were generated here, and how it ended."""
        self.rows[number].ended = (list(token_ids), end)

    def cut(self, keys: Iterable[int]) -> list[int]:
        """Numbers of the requests that are here; those that have not ended by themselves end now, where they are."""
        numbers = [self.number[key] for key in keys if key in self.number]
        for number in numbers:
            if self.rows[number].ended is None:
                self.end(number, self.draws.outputs.get(number, ()), CUT)
        return numbers

    def begun(self, numbers: set[int]) -> set[int]:
        """Those of them that have a token or are gone."""
        return {number for number in numbers if number not in self.rows or self.draws.outputs.get(number)}

    def progress(self, version: int) -> TokenDeltas:
        """What is new of every request; those that have ended are forgotten. Raises RuntimeError where tokens and
        log-probabilities do not match."""
        news: list[tuple[int, int, int, int]] = []
        numbers, firsts, token_ids, over = [], [], [], []
        for number, row in self.rows.items():
            tokens, end = row.ended or (self.draws.outputs.get(number, []), GOES_ON)
            new = tokens[row.told :]
            if not new and end == GOES_ON:
                continue
            news.append((row.request.key, len(row.request.generated) + row.told, len(new), end))
            numbers.append(number)
            firsts.append(row.told)
            token_ids += new
            row.told += len(new)
            if end != GOES_ON:
                over.append(number)
        counts = np.array([one[2] for one in news], np.int64)
        logprobs = self._logprobs(np.array(numbers, np.int64), np.array(firsts, np.int64), counts)
        if not np.isfinite(logprobs).all():
            at = int(np.searchsorted(np.cumsum(counts), np.flatnonzero(~np.isfinite(logprobs))[0], side="right"))
            raise RuntimeError(f"request {news[at][0]}: the sampler kept no log-probability for one of its tokens")
        self.forget(over)
        return TokenDeltas.of(version, news, token_ids, logprobs)

    def _logprobs(self, numbers: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """(Σ counts,) of the tokens from position `firsts` on of each request; NaN where nothing was drawn."""
        drawn, positions, values = self.draws.take()
        found = np.full(int(counts.sum()), np.nan, np.float32)
        if not len(numbers):
            return found
        row = np.minimum(np.searchsorted(numbers, drawn), len(numbers) - 1)
        known = numbers[row] == drawn
        again = known & (positions < firsts[row])
        if again.any():
            key = self.rows[int(drawn[again][0])].request.key
            raise RuntimeError(f"request {key}: vLLM took back a token that was told already")
        kept = known & (positions - firsts[row] < counts[row])
        begins = np.cumsum(counts) - counts
        found[(begins[row] + positions - firsts[row])[kept]] = values[kept]  # of a position drawn twice the last stays
        return found

    def forget(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            del self.number[self.rows.pop(number).request.key]
            self.draws.forget(number)
