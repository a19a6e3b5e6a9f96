"""The running requests of one engine, and which of their tokens were reported."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhfless_ray.engine.token_deltas import CUT, GOES_ON, TokenDeltas
from rlhfless_ray.types import Request


class Draws(Protocol):
    """Drawn tokens by number of the request."""

    outputs: dict[int, list[int]]  # all tokens generated here, until `forget`

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return numbers (m,), positions (m,) and log-probabilities (m,) float32 of the draws since the last call."""

    def forget(self, number: int) -> None: ...


@dataclass
class _Row:
    """A running request.

    `reported`, `searched`: number of its tokens, generated here, that were reported and searched for stop words. `ended`: all tokens
    generated here, and the index of the end in `ENDS`.
    """

    request: Request
    reported: int = 0
    searched: int = 0
    ended: tuple[list[int], int] | None = None


class RunningRequests:
    """Requests by number. Keys are not unique: a request may leave and return while vLLM still knows the old one."""

    def __init__(self, draws: Draws) -> None:
        """`draws`: what the engine has drawn. The keys of the exact engine's sampler are these numbers."""
        self.draws = draws
        self.rows: dict[int, _Row] = {}  # numbers ascend
        self.number: dict[int, int] = {}  # by key
        self.numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def decoding(self) -> int:
        """Number of requests that have not ended."""
        return sum(row.ended is None for row in self.rows.values())

    def add(self, request: Request) -> int:
        """Add a request and return its number. Raises RuntimeError if its key is running already."""
        if request.key in self.number:
            raise RuntimeError(f"request {request.key} is running in this engine already")
        number = next(self.numbers)
        self.rows[number], self.number[request.key] = _Row(request), number
        return number

    def end(self, number: int, token_ids: Iterable[int], end: int) -> None:
        """Record the end of a request. `token_ids`: all tokens generated here. `end`: index into `ENDS`."""
        self.rows[number].ended = (list(token_ids), end)

    def cut(self, keys: Iterable[int]) -> list[int]:
        """Cut the requests that are here, unless they have ended, and return their numbers."""
        numbers = [self.number[key] for key in keys if key in self.number]
        for number in numbers:
            if self.rows[number].ended is None:
                self.end(number, self.draws.outputs.get(number, ()), CUT)
        return numbers

    def find_begun(self, numbers: set[int]) -> set[int]:
        """Return those of `numbers` that have a token or are gone."""
        return {number for number in numbers if number not in self.rows or self.draws.outputs.get(number)}

    def take_deltas(self, version: int) -> TokenDeltas:
        """Return the unreported tokens of every request, and forget those that have ended.

        Raises RuntimeError if tokens and log-probabilities do not match.
        """
        news: list[tuple[int, int, int, int]] = []
        numbers, firsts, token_ids, over = [], [], [], []
        for number, row in self.rows.items():
            tokens, end = row.ended or (self.draws.outputs.get(number, []), GOES_ON)
            new = tokens[row.reported :]
            if not new and end == GOES_ON:
                continue
            news.append((row.request.key, len(row.request.generated) + row.reported, len(new), end))
            numbers.append(number)
            firsts.append(row.reported)
            token_ids += new
            row.reported += len(new)
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
        """Return (Σ counts,) log-probabilities of the tokens from position `firsts` of each request; NaN where none was drawn."""
        drawn, positions, values = self.draws.take()
        logprobs = np.full(int(counts.sum()), np.nan, np.float32)
        if not len(numbers):
            return logprobs
        row = np.minimum(np.searchsorted(numbers, drawn), len(numbers) - 1)
        known = numbers[row] == drawn
        again = known & (positions < firsts[row])
        if again.any():
            key = self.rows[int(drawn[again][0])].request.key
            raise RuntimeError(f"request {key}: vLLM drew a token again that was reported already")
        kept = known & (positions - firsts[row] < counts[row])
        begins = np.cumsum(counts) - counts
        logprobs[(begins[row] + positions - firsts[row])[kept]] = values[kept]  # the last draw of a position counts
        return logprobs

    def forget(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            del self.number[self.rows.pop(number).request.key]
            self.draws.forget(number)
