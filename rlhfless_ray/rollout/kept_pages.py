"""KV pages of unfinished responses between two rollouts, with `rollout.partial_kv: keep`.

An engine that cuts a response keeps the pages of its context, and hands them over to the object store. The engine that continues it
under newer weights loads them instead of computing the context again. Pages that are lost or have no room are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from rlhfless_ray.engine.control_queue import new_ticket
from rlhfless_ray.rollout.engine_calls import Attached, Ref
from rlhfless_ray.rollout.events import Event, RolloutEnded, TokensArrived
from rlhfless_ray.rollout.live_rollout import LiveRollout, Plugin
from rlhfless_ray.types import Request, SampleId

STORE_SHARE = 0.25  # share of the object store for these pages: weights, snapshots and prefix pages need the rest
ARRIVAL_S = 5.0  # timeout for pages to reach the object store after a rollout


class KeptPages(Plugin):
    """References to the pages of cut responses, by the seeds of their requests, which identify a response in every step."""

    def __init__(self, count: int, block_size: int, page_bytes: int, store_bytes: int) -> None:
        """`count`: responses per prompt, which share the pages of the prompt. `store_bytes`: size of the object store."""
        self.count, self.block_size, self.page_bytes = count, block_size, page_bytes
        self.limit_bytes = STORE_SHARE * store_bytes
        self.pages_of: dict[int, Ref] = {}  # by seed: a reference to the pages that the last rollout left
        self.contexts: dict[int, int] = {}  # by key: context tokens of continued requests without a token yet in this rollout
        self.tokens = 0  # context tokens whose KV was loaded instead of computed, since `take_tokens`
        self._next: dict[int, Ref] = {}
        self._tickets: dict[tuple[int, SampleId], int] = {}  # by engine and group
        self._bytes = 0.0  # of pages that this rollout keeps, estimated

    def begin(self, rollout: LiveRollout) -> None:
        super().begin(rollout)
        self.log = token_log = rollout.token_log
        begun = np.flatnonzero(~token_log.finished & (token_log.length > 0)).tolist()
        self.contexts = {i: int(token_log.prompt[i] + token_log.length[i]) for i in begun}
        self._next, self._tickets, self._bytes = {}, {}, 0.0

    def attach(self, number: int, requests: list[Request]) -> Attached:
        """Return references to the pages of these requests' contexts."""
        pages = {self.pages_of[request.seed]: None for request in requests if request.generated and request.seed in self.pages_of}
        return {"pages": tuple(pages)} if pages else {}

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokensArrived):
            self.observe(event.deltas.computed)
            if self.rollout.stopping:
                self.fetch(event.call.number, event.call.instance.actor, event.cut)
        elif isinstance(event, RolloutEnded):
            self.end()

    def observe(self, computed: Mapping[int, int]) -> None:
        """Record how many context tokens engines computed, by key. Only a request's first report counts."""
        for key, tokens in computed.items():
            self.tokens += max(0, self.contexts.pop(key, tokens) - tokens)

    def take_tokens(self) -> int:
        tokens, self.tokens = self.tokens, 0
        return tokens

    # ---- the end of a rollout -------------------------------------------------------------------------------------

    def cuts(self, engine: int, keys: np.ndarray) -> dict[int, list[int]]:
        """Return {ticket: keys} of an engine's requests that are to be cut. Ticket 0: there is no room for their pages."""
        by_ticket: dict[int, list[int]] = {}
        token_log = self.log
        contexts = token_log.prompt[keys] + token_log.length[keys]
        for key, context in sorted(zip(keys.tolist(), contexts.tolist(), strict=True), key=lambda one: -one[1]):
            place = engine, token_log.requests[key].id.group(self.count)  # the pages of a group go together
            if place not in self._tickets:
                wanted = -(-context // self.block_size) * self.page_bytes * self.count
                fits = self._bytes + wanted <= self.limit_bytes
                self._bytes += wanted * fits
                self._tickets[place] = new_ticket() if fits else 0
            by_ticket.setdefault(self._tickets[place], []).append(key)
        return by_ticket

    def fetch(self, engine: int, actor: Any, cut: np.ndarray) -> None:
        """Fetch the pages of requests that an engine has just cut into the object store. `actor`: the engine's process."""
        token_log = self.log
        by_ticket: dict[int, list[int]] = {}
        for key in cut[token_log.length[cut] > 0].tolist():
            if ticket := self._tickets.get((engine, token_log.requests[key].id.group(self.count))):
                by_ticket.setdefault(ticket, []).append(key)
        for ticket, keys in by_ticket.items():
            ref = actor.hand_over.options(concurrency_group="pages").remote(ticket)
            self._next |= {token_log.requests[key].seed: ref for key in keys}

    def end(self) -> None:
        """Drop the pages that this rollout used, and wait until those of its cut requests have left their engines."""
        self.pages_of = self._next
        if refs := list(dict.fromkeys(self.pages_of.values())):
            ray.wait(refs, num_returns=len(refs), timeout=ARRIVAL_S, fetch_local=False)
