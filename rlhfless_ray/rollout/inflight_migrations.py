"""Requests on their way from one engine to another: cut requested, cut, sent on, first token received."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import ray
from ray.exceptions import RayError

from rlhfless_ray.engine.control_queue import EngineCommand, new_ticket
from rlhfless_ray.engine.token_deltas import TokenDeltas
from rlhfless_ray.rollout.engine_calls import EngineCall, EngineCalls, Ref, count_sequences
from rlhfless_ray.rollout.token_log import TokenLog

COPY_TOKENS = 256  # shortest context whose full blocks are copied before the cut: a copy costs messages, and saves a transfer
COPY_S = 2.0  # timeout for the copy


@dataclass(frozen=True)
class MigrationRequest:
    """Requests (keys) to move from one engine to another (numbers).

    `how`: "prefill" computes contexts again, "pages" copies their KV. `within_s`: the cut comes no later, also if pages have not arrived.
    """

    requests: np.ndarray
    source: int
    target: int
    reason: str
    how: str = "prefill"
    within_s: float = 2 * COPY_S


# From requests, their record, source, target and reason: moves by the faster method for each context
ChooseMethods = Callable[[np.ndarray, TokenLog, int, int, str], list[MigrationRequest]]


def by_prefill(requests: np.ndarray, token_log: TokenLog, source: int, target: int, reason: str) -> list[MigrationRequest]:
    """Move requests so that the target computes their contexts again."""
    return [MigrationRequest(requests, source, target, reason)]


@dataclass(frozen=True)
class MigrationStats:
    """A completed move of a request.

    Attributes:
        seconds: from the decision to the first token on the new engine, measured by the driver.
        pause_s: the same without the time in which the request was still decoded while its blocks were copied.
        how: the chosen transfer method, "prefill" or "pages".
        computed_tokens: context tokens that the new engine computed; None if it does not report that.
    """

    key: int
    source: str
    target: str
    context_tokens: int
    seconds: float
    reason: str
    how: str = "prefill"
    computed_tokens: int | None = None
    pause_s: float = 0.0

    @property
    def fell_back(self) -> bool:
        """Whether the context was computed although its pages should have been copied. One token is always computed."""
        return self.how == "pages" and (self.computed_tokens is None or self.computed_tokens > 1)


@dataclass
class _Route:
    source: int
    target: int
    decided_s: float
    reason: str
    ticket: int  # 0: the context is computed again
    cut_s: float = 0.0  # when the cut was requested


class InflightMigrations:
    def __init__(self, calls: EngineCalls, token_log: TokenLog) -> None:
        self.calls, self.token_log = calls, token_log
        self.choose_methods: ChooseMethods = by_prefill
        self.leaving: dict[int, _Route] = {}  # by request: the cut was requested
        self.landing: dict[int, _Route] = {}  # by request: sent to the target, which has reported no token of it yet
        self.moved: list[MigrationStats] = []
        self.copying: dict[Ref, tuple[MigrationRequest, float]] = {}  # by reference to the copy's arrival: the move, and when to cut anyway

    def move(self, requests: np.ndarray, source: int, target: int, reason: str, choose: ChooseMethods | None = None) -> None:
        """Move requests (keys) from one engine to another (numbers). `choose`: other than `choose_methods`."""
        for move in (choose or self.choose_methods)(requests, self.token_log, source, target, reason):
            self.start(move)

    def start(self, move: MigrationRequest) -> None:
        """Ask the source to cut the requests, or first to copy their full KV blocks.

        Does nothing if the source's call has just ended, because it has no requests then.
        """
        call = self.calls.find(move.source)
        if call is None:
            return
        now, ticket, requests = time.monotonic(), new_ticket() if move.how == "pages" else 0, move.requests.tolist()
        for i in requests:
            self.leaving[i] = _Route(move.source, move.target, now, move.reason, ticket)
        if ticket and int((self.token_log.prompt[requests] + self.token_log.length[requests]).max()) >= COPY_TOKENS:
            copied = new_ticket()
            what = f"copy {count_sequences(len(requests))}"
            self.calls.send_command(call, EngineCommand(copy=tuple(requests), what=what, ticket=copied))
            pages = call.instance.actor.hand_over.options(concurrency_group="pages").remote(copied, COPY_S)
            arrived = self.calls.engines[move.target].actor.receive_pages.options(concurrency_group="control").remote((pages,))
            self.copying[arrived] = move, now + move.within_s
        else:
            self._cut(move)

    def _cut(self, move: MigrationRequest, after_copy: bool = False) -> None:
        """Ask the source to cut those requests of a move that have not ended. `after_copy`: their full blocks have arrived."""
        requests = [i for i in move.requests.tolist() if i in self.leaving and self.leaving[i].source == move.source]
        if not requests or (call := self.calls.find(move.source)) is None:
            return
        for i in requests:
            self.leaving[i].cut_s = time.monotonic()
        what = f"move {count_sequences(len(requests))} to {self.calls.engines[move.target].id}"
        ticket = self.leaving[requests[0]].ticket
        self.calls.send_command(call, EngineCommand(cut=tuple(requests), what=what, ticket=ticket, after_copy=after_copy))

    def poll(self) -> None:
        """Cut the requests whose full blocks have arrived, or failed to."""
        if not self.copying:
            return
        arrived, _ = ray.wait(list(self.copying), num_returns=len(self.copying), timeout=0, fetch_local=False)
        now = time.monotonic()
        for ref in [ref for ref, (_, late_s) in self.copying.items() if ref in arrived or now > late_s]:
            self._cut(self.copying.pop(ref)[0], ref in arrived and _has_succeeded(ref))

    def is_target(self, number: int) -> bool:
        """Return whether a request is on its way to this engine."""
        return any(route.target == number for route in self.leaving.values())

    def cancel(self, keys: Iterable[int]) -> set[int]:
        """Cancel moves of requests that ended or whose engine did. Returns their target engines."""
        return {self.leaving.pop(i).target for i in keys if i in self.leaving}

    def forward(self, cut: np.ndarray) -> None:
        """Send cut requests to their targets, or to any engine if the target has died or left."""
        together: dict[tuple[int, int, int], list[int]] = {}
        for i in cut.tolist():
            route = self.landing[i] = self.leaving.pop(i)
            together.setdefault((route.source, route.target, route.ticket), []).append(i)
        available = self.calls.available_or_starting() if together else []
        for (source, target, ticket), keys in together.items():
            if target in available:
                giver = self.calls.engines[source]
                pages = (giver.actor.hand_over.options(concurrency_group="pages").remote(ticket),) if ticket else ()
                self.calls.send(target, np.array(keys), f"take {count_sequences(len(keys))} from {giver.id}", pages)
            else:
                self.calls.spread(np.array(keys), available)

    def complete(self, call: EngineCall, deltas: TokenDeltas) -> list[MigrationStats]:
        """Return the moves that these deltas complete, because they contain the first tokens after them."""
        now, done = time.monotonic(), []
        for key, start, count in zip(deltas.keys.tolist(), deltas.starts.tolist(), deltas.counts.tolist(), strict=True):
            if not count or key not in self.landing or self.token_log.owner[key] != call.number:
                continue
            route, context = self.landing.pop(key), int(self.token_log.prompt[key]) + start
            source = self.calls.engines[route.source].id
            how = "pages" if route.ticket else "prefill"
            seconds, computed = now - route.decided_s, deltas.computed.get(key)
            pause_s = now - (route.cut_s or route.decided_s)
            done.append(MigrationStats(key, source, call.instance.id, context, seconds, route.reason, how, computed, pause_s))
        self.moved += done
        return done


def _has_succeeded(fetch: Ref) -> bool:
    try:
        return bool(ray.get(fetch))
    except RayError:  # the loss of an engine shows in its own call
        return False
