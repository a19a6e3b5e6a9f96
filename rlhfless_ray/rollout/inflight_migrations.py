"""Requests on their way from one engine to another: cut asked for, cut, sent on, first token heard."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rlhfless_ray.rollout.control_queue import EngineCommand
from rlhfless_ray.rollout.engine_calls import EngineCall, EngineCalls, sequences
from rlhfless_ray.rollout.migration_policy import MigrationRequest
from rlhfless_ray.rollout.token_deltas import TokenDeltas
from rlhfless_ray.rollout.token_log import TokenLog

_tickets = itertools.count(1)  # for KV pages that wait to be handed over


@dataclass(frozen=True)
class MigrationStats:
    """A request that went to another engine. seconds: from the wish to the first token there, at the driver. how: the way that
    was chosen, "prefill" or "pages"; computed_tokens: of its context, on the new engine, None where that is not told."""

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
        """Whether it should have come as pages and was computed all the same: a token is, whatever comes."""
        return self.how == "pages" and (self.computed_tokens is None or self.computed_tokens > 1)


@dataclass
class _Way:
    source: int
    target: int
    wished_s: float
    reason: str
    ticket: int  # 0: its context is computed again


class InflightMigrations:
    def __init__(self, launches: EngineCalls, token_log: TokenLog, expected: np.ndarray) -> None:
        self.launches, self.token_log, self.expected = launches, token_log, expected
        self.leaving: dict[int, _Way] = {}  # by request: the cut is asked for
        self.landing: dict[int, _Way] = {}  # sent on, and not heard of since
        self.moved: list[MigrationStats] = []

    def cut(self, wish: MigrationRequest) -> None:
        """Ask the source for the requests. One whose call has just ended has none to give."""
        launch = self.launches.of(wish.source)
        if launch is None:
            return
        now, ticket = time.monotonic(), next(_tickets) if wish.how == "pages" else 0
        for i in wish.requests.tolist():
            self.leaving[i] = _Way(wish.source, wish.target, now, wish.reason, ticket)
        keys = tuple(self.token_log.requests[i].key for i in wish.requests.tolist())
        what = f"move {sequences(len(keys))} to {self.launches.engines[wish.target].id}"
        self.launches.tell(launch, EngineCommand(cut=keys, what=what, ticket=ticket))

    def awaited_by(self, number: int) -> bool:
        """Whether something is on its way to this engine."""
        return any(way.target == number for way in self.leaving.values())

    def stay(self, indices: Iterable[int]) -> set[int]:
        """These leave no more: they ended, or their engine did. Returns the engines they would have gone to."""
        return {self.leaving.pop(i).target for i in indices if i in self.leaving}

    def go_on(self, cut: np.ndarray) -> None:
        """Requests were cut and go where they were wished, or anywhere if that engine has died or gone meanwhile."""
        together: dict[tuple[int, int, int], list[int]] = {}
        for i in cut.tolist():
            way = self.landing[i] = self.leaving.pop(i)
            together.setdefault((way.source, way.target, way.ticket), []).append(i)
        living = self.launches.living() if together else []
        for (source, target, ticket), indices in together.items():
            if target in living:
                giver = self.launches.engines[source]
                pages = (giver.actor.hand_over.options(concurrency_group="pages").remote(ticket),) if ticket else ()
                self.launches.send(target, np.array(indices), f"take {sequences(len(indices))} from {giver.id}", pages)
            else:
                self.launches.spread(np.array(indices), living, self.expected)

    def landed(self, launch: EngineCall, progress: TokenDeltas) -> list[MigrationStats]:
        """The moves that are done, as these are the first tokens."""
        now, done = time.monotonic(), []
        mine = {self.token_log.requests[i].key: i for i in self.landing if self.token_log.owner[i] == launch.number}
        for key, start, count in zip(progress.keys.tolist(), progress.starts.tolist(), progress.counts.tolist(), strict=True):
            if not count or key not in mine:
                continue
            way, context = self.landing.pop(mine[key]), int(self.token_log.prompt[mine[key]]) + start
            source = self.launches.engines[way.source].id
            how = "pages" if way.ticket else "prefill"
            seconds, computed = now - way.wished_s, progress.computed.get(key)
            done.append(MigrationStats(key, source, launch.instance.id, context, seconds, way.reason, how, computed))
        self.moved += done
        return done
