"""What every engine that takes vLLM's steps does: the loop around them, commands, stop words and records."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhfless_ray.engine.control_queue import ControlQueue, EngineCommand
from rlhfless_ray.engine.engine_arguments import read_stop_tokens
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.protocol import EngineStats
from rlhfless_ray.engine.running_requests import Draws, RunningRequests
from rlhfless_ray.engine.stop_strings import StopStrings
from rlhfless_ray.engine.token_deltas import ENDS, STOP, TokenDeltas
from rlhfless_ray.types import EngineStep, Request, Span


class SteppedEngine(ABC):
    """An `Engine` but for its weights and processes."""

    def __init__(self, folder: Path, settings: EngineSettings, tokenizer: Callable[[], Any] | None, draws: Draws) -> None:
        self.version: int | None = None
        self.live = RunningRequests(draws)
        self.stop_strings = StopStrings(tokenizer)
        self.stop_token_ids = read_stop_tokens(folder, settings.end_token_id)
        self.steps: list[EngineStep] = []
        self.spans: list[Span] = []  # spans of commands

    @abstractmethod
    def _add(self, requests: Iterable[Request]) -> set[int]:
        """Give requests to vLLM, and return their numbers."""

    @abstractmethod
    def _step(self) -> bool:
        """Compute a step, and record it and what has ended. Returns whether an awaited request has."""

    @abstractmethod
    def _abort(self, numbers: Iterable[int]) -> None:
        """Make vLLM forget these requests. It may have done so already."""

    def _cut(self, command: EngineCommand) -> None:
        """Cut requests. Those that have ended are left as they are."""
        self._abort(self.live.cut(command.cut))

    def _take_deltas(self, version: int) -> TokenDeltas:
        return self.live.take_deltas(version)

    def _carry_out(self, command: EngineCommand) -> set[int]:
        """Carry out a command, and return the numbers of the added requests."""
        begin = time.time()
        self._cut(command)
        added = self._add(command.add)
        if command.what:
            self.spans.append(Span("transfer", command.what, begin, time.time()))
        return added

    def _forget(self) -> None:
        """Drop all requests."""
        self._abort(list(self.live.rows))
        self.live.forget(self.live.rows)
        self.live.draws.take()

    def generate(
        self, requests: Iterable[Request], interval_s: float = float("inf"), control_queue: ControlQueue | None = None
    ) -> Iterator[TokenDeltas]:
        """Yield new tokens, see `Engine.generate`. Commands of `control_queue` are carried out between two steps.

        Raises RuntimeError also if tokens and log-probabilities do not match.
        """
        if self.version is None:
            raise RuntimeError("this engine has no weights yet: load a version first")
        fresh: set[int] = set()  # added by a command, without a token yet
        try:
            self._add(requests)
            last = time.perf_counter()
            while True:
                for command in control_queue.take() if control_queue else ():
                    fresh |= self._carry_out(command)
                    if command.cut:
                        yield self._take_deltas(self.version)
                if not self.live:
                    if control_queue is None or control_queue.close_if_empty():
                        return
                    continue
                has_awaited = self._step()
                begun, now = self.live.find_begun(fresh), time.perf_counter()
                if begun or has_awaited or not self.live.decoding or now - last >= interval_s:
                    fresh -= begun
                    yield self._take_deltas(self.version)
                    last = now
        finally:  # also if the caller stops iterating
            self._forget()

    def _find_stop_word(self, number: int, tokens: Sequence[int], length: int) -> Sequence[int] | None:
        """Return the first of a request's tokens up to the end of a stop word, if there is one in what was not searched yet.

        `tokens`: generated here. Those after `length`, which a step with drafts may have drawn after the response's end, do not count.
        """
        row = self.live.rows[number]
        request = row.request
        for count in range(row.searched + 1, length + 1) if request.stop else ():
            response = tokens if count == len(tokens) else tokens[:count]  # without drafts a step copies no response
            if self.stop_strings.has_completed(response, request.stop, request.generated, request.min_tokens):
                self.live.end(number, response, STOP)
                return response
        row.searched = length
        return None

    def _end(self, number: int, tokens: Iterable[int], reason: str | None) -> None:
        """Record the end of a request for vLLM's reason. `tokens`: all that were generated here."""
        if reason not in ENDS[1:3]:
            raise RuntimeError(f"vLLM ended request {self.live.rows[number].request.key} as {reason!r}")
        self.live.end(number, tokens, ENDS.index(reason))

    def take_stats(self) -> EngineStats:
        """Return the records of steps and the spans of commands since the last call."""
        stats = EngineStats(self.steps, self.spans, time.time())
        self.steps, self.spans = [], []
        return stats


def check_weights_used(version: int, missing: Collection[str], unused: Collection[str]) -> None:
    """Raise ValueError if vLLM lacks weights, or does not use biases, of this version."""
    if missing:
        raise ValueError(f"weight version {version} lacks {len(missing)} of the engine's weights, {min(missing)} first")
    if unused:
        raise ValueError(f"vLLM does not use {len(unused)} biases of weight version {version}, {min(unused)} first; use another model")
