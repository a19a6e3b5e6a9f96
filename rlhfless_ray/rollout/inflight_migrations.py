"""Requests on their way from one engine to another: cut requested, cut, sent on, first token received."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rlhfless_ray.rollout.control_queue import EngineCommand
from rlhfless_ray.rollout.engine_calls import EngineCall, EngineCalls, count_sequences
from rlhfless_ray.rollout.migration_policy import MigrationRequest
from rlhfless_ray.rollout.token_deltas import TokenDeltas
from rlhfless_ray.rollout.token_log import TokenLog

_tickets = itertools.count(1)  # identify KV pages that an engine keeps for the next one


@dataclass(frozen=True)
class MigrationStats:
    """A completed move of a request.

    `seconds`: from the decision to the first token on the new engine, measured by the driver. `how`: the chosen transfer
    method, "prefill" or "pages". `computed_tokens`: context tokens that the new engine computed; None if it does not report that.
    """

    key: int
    source: str
    target: str
    context_tokens: int
    seconds: float
    reason: str
    how: str = "prefill"
    computed_tokens: int | None = None

    @property
    def fell_back(self) -> bool:
        """Whether pages were to be carried but the context was computed. One token always is."""
        return self.how == "pages" and (self.computed_tokens is None or self.computed_tokens > 1)


@dataclass
class _Route:
    source: int
    target: int
    decided_s: float
    reason: str
    ticket: int  # 0: the context is computed again


class InflightMigrations:
    def __init__(self, calls: EngineCalls, token_log: TokenLog, expected: np.ndarray) -> None:
        self.calls, self.token_log, self.expected = calls, token_log, expected
        self.leaving: dict[int, _Route] = {}  # by request: the cut was requested
        self.landing: dict[int, _Route] = {}  # sent on, without a token since
        self.moved: list[MigrationStats] = []

    def start(self, move: MigrationRequest) -> None:
        """Ask the source to cut the requests. Does nothing if its call has just ended, because then it has none."""
        call = self.calls.find(move.source)
        if call is None:
            return
        now, ticket = time.monotonic(), next(_tickets) if move.how == "pages" else 0
        for i in move.requests.tolist():
            self.leaving[i] = _Route(move.source, move.target, now, move.reason, ticket)
        keys = tuple(self.token_log.requests[i].key for i in move.requests.tolist())
        what = f"move {count_sequences(len(keys))} to {self.calls.engines[move.target].id}"
        self.calls.send_command(call, EngineCommand(cut=keys, what=what, ticket=ticket))

    def is_target(self, number: int) -> bool:
        """Return whether a request is on its way to this engine."""
        return any(route.target == number for route in self.leaving.values())

    def cancel(self, indices: Iterable[int]) -> set[int]:
        """Cancel moves of requests that ended or whose engine did. Returns their target engines."""
        return {self.leaving.pop(i).target for i in indices if i in self.leaving}

    def forward(self, cut: np.ndarray) -> None:
        """Send cut requests to their targets, or to any engine if the target has died or left."""
        together: dict[tuple[int, int, int], list[int]] = {}
        for i in cut.tolist():
            route = self.landing[i] = self.leaving.pop(i)
            together.setdefault((route.source, route.target, route.ticket), []).append(i)
        available = self.calls.available() if together else []
        for (source, target, ticket), indices in together.items():
            if target in available:
                giver = self.calls.engines[source]
                pages = (giver.actor.hand_over.options(concurrency_group="pages").remote(ticket),) if ticket else ()
                self.calls.send(target, np.array(indices), f"take {count_sequences(len(indices))} from {giver.id}", pages)
            else:
                self.calls.spread(np.array(indices), available, self.expected)

    def complete(self, call: EngineCall, deltas: TokenDeltas) -> list[MigrationStats]:
        """Return the moves that these deltas complete, because they contain the first tokens after them."""
        now, done = time.monotonic(), []
        mine = {self.token_log.requests[i].key: i for i in self.landing if self.token_log.owner[i] == call.number}
        for key, start, count in zip(deltas.keys.tolist(), deltas.starts.tolist(), deltas.counts.tolist(), strict=True):
            if not count or key not in mine:
                continue
            route, context = self.landing.pop(mine[key]), int(self.token_log.prompt[mine[key]]) + start
            source = self.calls.engines[route.source].id
            how = "pages" if route.ticket else "prefill"
            seconds, computed = now - route.decided_s, deltas.computed.get(key)
            done.append(MigrationStats(key, source, call.instance.id, context, seconds, route.reason, how, computed))
        self.moved += done
        return done
