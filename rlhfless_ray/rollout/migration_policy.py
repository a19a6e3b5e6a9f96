"""Moves of a running rollout: the planner is asked with live progress, and told what moves take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placement.forecast.group_conditioning import group_error_correlation
from placement.forecast.remaining_length import Forecast
from placement.migration.decide_moves import LiveState, Moves, cut_at_share, decide_moves
from placement.migration.move_search import Settings
from placement.speed.cost_terms import Term
from placement.speed.decode_speed import Speed
from rlhfless_ray.common.errors import describe_failure
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import EngineStep

RECENT = 64  # step records that tell the present speed
LEAST_MU, MOST_MU = 1e-4, 1e4  # seconds that a slot-second is worth: a plan needs some weight of both


@dataclass(frozen=True)
class MigrationRequest:
    """Requests (indices) that should leave an engine for another one (numbers), and why."""

    requests: np.ndarray
    source: int
    target: int
    reason: str
    how: str = "prefill"  # the way's name


@dataclass(frozen=True)
class MigrationRequests:
    """time_saved_s: expected, 0 where only leases are saved; emptied: engines that would have nothing left."""

    moves: tuple[MigrationRequest, ...] = ()
    time_saved_s: float = 0.0
    emptied: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class TransferMethod:
    """How a sequence's context gets to its new engine, and what that takes, from the wish to the first token there."""

    name: str  # "prefill": computed again from its tokens; "pages": its KV pages are carried
    seconds: float


def how_to_move(context_tokens: float, prefill: Term, pages: Term | None = None) -> TransferMethod:
    """The quicker way for a context of so many tokens. `pages`: None where engines have nothing to carry pages with."""
    if pages is None:
        return TransferMethod("prefill", prefill.predict(context_tokens))
    ways = [
        TransferMethod("prefill", _expected(context_tokens, prefill, pages)),
        TransferMethod("pages", _expected(context_tokens, pages, prefill)),
    ]
    return min(ways, key=lambda way: way.seconds)


def _expected(context_tokens: float, term: Term, other: Term) -> float:
    """Seconds of a move. Whatever the context, the two engines have to end their steps first: of a way that was never tried, that
    part is to its seed as the other way's is to its own."""
    if term.records or not other.records:
        return term.predict(context_tokens)
    return term.fixed_s * other.fixed_s / float(other.seed[0]) + term.per_unit_s * context_tokens


class MigrationPolicy:
    """The rule of a run. What moves took in one rollout is known in the next."""

    def __init__(self, rule: str, tau: float, carries: bool = False) -> None:
        """`rule`: "tau", the RLHFless paper's (arXiv 2602.22718) with share `tau`, or "auto", the planner's. `carries`: engines
        keep KV pages, so that these can be carried."""
        if rule not in ("tau", "auto"):
            raise ValueError(f"no rule of migration is called {rule!r}")
        self.rule, self.tau = rule, tau
        self.prefill = Term(0.05, 2e-5)  # seconds of a move over context tokens
        self.pages = Term(0.06, 2e-6) if carries else None
        self.forecast = Forecast(np.zeros(0), np.zeros(0))
        self.group, self.group_correlation = np.zeros(0, int), 0.0
        self.speed, self.mu, self.token_s, self.limit = Speed(1.0, 0.0), 1.0, 0.0, np.inf
        self.trouble: str | None = None  # of this rollout: it goes on without moves

    def by_way(self, requests: np.ndarray, token_log: TokenLog, source: int, target: int, reason: str) -> list[MigrationRequest]:
        """The wish to move these requests, each by the quicker way for its own context. What has no token yet has no KV either."""
        said, context = token_log.length[requests], (token_log.prompt + token_log.length)[requests]
        paged = (said > 0) & self._by_pages(context)
        parts = (requests[~paged], "prefill"), (requests[paged], "pages")
        return [MigrationRequest(part, source, target, reason, how) for part, how in parts if len(part)]

    def _way(self, context_tokens: float) -> TransferMethod:
        return how_to_move(context_tokens, self.prefill, self.pages)

    def _by_pages(self, context: np.ndarray) -> np.ndarray:
        """(n,) bool: for which contexts (n,), in tokens, pages are the quicker way."""
        return np.array([self._way(float(c)).name == "pages" for c in context], bool)

    def _work_s(self, context: np.ndarray) -> float:
        """What contexts (n,) that come take of an engine's time: to compute them, or to take in their pages."""
        page_s = self.pages.per_unit_s if self.pages is not None else 0.0
        return float(np.where(self._by_pages(context), page_s, self.token_s) @ context)

    def begin(
        self, lengths: np.ndarray, speed: Speed, second: float, token_s: float = 0.0, samples: int = 1, limit: float = np.inf
    ) -> None:
        """A rollout begins. lengths (n, S): joint draws of its responses' lengths, tokens; `second`: what a second of its time
        is worth in slot-seconds; `token_s`: of an engine's time for a token of a prompt; `samples` of each prompt, which
        lie side by side and tell of each other; `limit`: tokens at which a response is cut. Never raises, nor does `decide`: moves
        save time or leases, nothing else hangs on them, so after a failure this rollout goes on without them."""
        self.trouble = None
        self.speed, self.token_s, self.limit = speed, token_s, limit
        self.mu = float(np.clip(1 / max(second, 1e-9), LEAST_MU, MOST_MU))
        self.group = np.arange(len(lengths)) // samples
        try:
            self.forecast = Forecast.from_scenarios(lengths)
            self.group_correlation = group_error_correlation(lengths, self.group)
        except Exception as error:
            self._give_up(error)

    def decide(self, token_log: TokenLog, engines: list[int], steps: list[EngineStep]) -> MigrationRequests:
        """What to move now. engines: numbers of those that can work, which hold every live request; steps: records so far."""
        if self.trouble is None:
            try:
                return self._decide(token_log, engines, steps)
            except Exception as error:
                self._give_up(error)
        return MigrationRequests(reason=self.trouble or "")

    def _give_up(self, error: Exception) -> None:
        self.trouble = describe_failure("deciding on moves", error)

    def _decide(self, token_log: TokenLog, engines: list[int], steps: list[EngineStep]) -> MigrationRequests:
        live = np.flatnonzero(~token_log.finished)
        place = {number: at for at, number in enumerate(engines)}
        actor = np.array([place.get(number, -1) for number in token_log.owner.tolist()])
        if len(engines) < 2 or not len(live) or (actor[live] < 0).any():
            return MigrationRequests(reason="nowhere to go")
        context = float((token_log.prompt + token_log.length)[live].mean())
        state = LiveState(
            self.forecast,
            token_log.length,
            token_log.finished,
            actor,
            tuple(range(len(engines))),
            context,
            self.group,
            self.group_correlation,
            self.limit,
        )
        if self.rule == "tau":
            begun = np.bincount(actor[actor >= 0], minlength=len(engines))
            new = cut_at_share(state, begun, self.tau)
            saved_s, reason = 0.0, f"a share of {self.tau:g} has finished"
        else:
            moves = self._best(state, self._present_speed(steps), token_log.prompt + token_log.length)
            new, saved_s, reason = moves.actor, moves.time_saved_s, moves.reason
        return self._wishes(token_log, live, actor, new, engines, saved_s, reason)

    def _best(self, state: LiveState, speed: Speed, context: np.ndarray) -> Moves:
        """The planner prices a move as a pause of what moves. To compute contexts again, or to take in their pages, is work of
        the engine that gets them, which all it holds wait for: many moves at once must be worth that too."""
        pause_s = self._way(state.context_tokens).seconds
        engines = len(state.opened)
        work_s = np.zeros(engines)
        for _ in range(2):
            moves = decide_moves(state, speed, Settings(self.mu, engines, migrate_s=pause_s + work_s.max()))
            work_s = np.zeros(engines)
            for move in moves.moves:
                work_s[move.target] += self._work_s(context[move.sequences])
            gain = moves.time_saved_s + self.mu * moves.cost_saved
            if gain > work_s.max() + self.mu * work_s.sum():
                return moves
        return replace(moves, actor=state.actor, moves=(), reason="moves would cost more than they save")

    def _wishes(
        self, token_log: TokenLog, live: np.ndarray, actor: np.ndarray, new: np.ndarray, engines: list[int], saved_s: float, reason: str
    ) -> MigrationRequests:
        changed = live[actor[live] != new[live]]
        pairs = sorted(set(zip(actor[changed].tolist(), new[changed].tolist(), strict=True)))
        moves = tuple(
            wish
            for a, b in pairs
            for wish in self.by_way(changed[(actor[changed] == a) & (new[changed] == b)], token_log, engines[a], engines[b], reason)
        )
        emptied = sorted(set(actor[live].tolist()) - set(new[live].tolist()))
        return MigrationRequests(moves, max(0.0, saved_s), tuple(engines[a] for a in emptied), reason)

    def _present_speed(self, steps: list[EngineStep]) -> Speed:
        """The speed as fitted so far, scaled to the newest steps: the first rollout knows none yet, and machines vary."""
        if not steps:
            return self.speed
        pairs = [(s.seconds, self.speed.step_s(s.running, s.context_tokens)) for s in steps[-RECENT:] if s.new_tokens <= s.running]
        if not pairs:
            return self.speed
        off = float(np.median([seconds / max(predicted, 1e-9) for seconds, predicted in pairs]))
        return Speed(off * self.speed.base_s, off * self.speed.per_seq_s, off * self.speed.per_ctx_s)

    def observe(self, context_tokens: float, seconds: float, how: str = "prefill") -> None:
        """A sequence was moved: from the wish to its first token elsewhere. `how`: the way that was tried; what came to nothing on
        it makes it the dearer one."""
        term = self.pages if how == "pages" else self.prefill
        if term is not None:
            term.observe(context_tokens, seconds)

    def state(self) -> dict[str, Any]:
        return {name: term.state() for name, term in (("prefill", self.prefill), ("pages", self.pages)) if term is not None}

    def restore(self, state: dict[str, Any]) -> None:
        for name, term in (("prefill", self.prefill), ("pages", self.pages)):
            if term is not None and name in state:
                term.restore(state[name])
