"""Move requests of a running rollout: call the planner with live progress, and measure the duration of moves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.forecast.scenarios import Scenarios
from placement.measurements.term import Term
from placement.migration.decide_moves import LiveState, Moves, Settings, cut_at_share, decide_moves
from placement.migration.evacuation import MoveTimes
from placement.speed.decode_speed import Speed
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.rollout.events import Event, RolloutProgress, TokensArrived
from rlhfless_ray.rollout.inflight_migrations import MigrationRequest
from rlhfless_ray.rollout.live_rollout import PREFILL_TIMES, LiveRollout, Plugin
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.step.engine_steps import EngineSteps

DECIDING_SHARE = 0.02  # largest share of the driver's time for decisions about moves
PAUSE_LEVEL = 0.8  # central interval whose upper end is the price of a pause: one in ten takes longer
RECENT = 64  # newest step records, which determine the present speed
MIN_COST_WEIGHT, MAX_COST_WEIGHT = 1e-4, 1e4  # seconds per slot-second: a plan needs some weight of both


@dataclass(frozen=True)
class MigrationRequests:
    """The moves to make now. `time_saved_s`: expected; 0 if they save leases only."""

    moves: tuple[MigrationRequest, ...] = ()
    time_saved_s: float = 0.0
    reason: str = ""


class MigrationPolicy(Plugin):
    """The migration policy of a run. Measured moves of one rollout inform the next.

    It decides one thing at a time: never while a request is between two engines.
    """

    def __init__(
        self,
        rule: str,
        tau: float,
        carries: bool = False,
        safely: Callable[..., Any] = lambda what, make, _: make(),
        are_taken: Callable[[], bool] = lambda: True,
    ) -> None:
        """Configure the policy.

        Args:
            rule: "tau", the rule of the RLHFless paper (arXiv 2602.22718) with share `tau`, "auto", the planner's, or "off".
            carries: whether engines can copy KV pages.
            safely: see `Predictor.safely`; the default lets exceptions pass.
            are_taken: whether this step makes the moves that the planner wants, see `StepPredictor.takes`.
        """
        self.rule, self.tau = rule, tau
        self.prefill = Term(*PREFILL_TIMES)  # seconds of a move by context tokens
        self.pages = Term(0.06, 2e-6) if carries else None
        self.forecast: Scenarios | None = None  # None: computed with the first decision
        self.lengths = np.zeros((0, 1))
        self.speed, self.cost_weight, self.token_s, self.limit = Speed(1.0, 0.0), 1.0, 0.0, np.inf
        self.kind_of: Callable[[int], tuple[Speed, float]] = lambda _: (self.speed, 1.0)  # speed and relative price of an engine
        self.are_taken = are_taken
        self.safely, self.has_failed = safely, False  # after a failure a rollout continues without moves
        self.start_s, self.decide_at_s = math.inf, 0.0
        self.kind_on: Callable[[str], tuple[Speed, float]] = lambda _: (self.speed, 1.0)  # the same of an engine on a node

    @property
    def is_on(self) -> bool:
        return self.rule != "off"

    # ---- in a rollout ---------------------------------------------------------------------------------------------

    def begin(self, rollout: LiveRollout) -> None:
        super().begin(rollout)
        rollout.migrations.choose_methods, rollout.move_times = self.choose_methods, self.move_times
        rollout.start_s, self.decide_at_s = self.start_s, 0.0
        self.kind_of = lambda number: self.kind_on(rollout.calls.engines[number].slot.node)

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokensArrived):
            for moved in event.moved:
                self.observe(moved.context_tokens, moved.pause_s, moved.how)
        elif isinstance(event, RolloutProgress):
            self._move()

    def _move(self) -> None:
        """Make the moves that are decided now."""
        rollout, began_s = self.rollout, time.monotonic()
        if rollout.stopping or rollout.migrations.leaving or not rollout.calls.running or began_s < self.decide_at_s:
            return
        decided = self.decide(rollout.token_log, rollout.calls.staying(), rollout.result.steps, rollout.calls.leaving())
        now = time.monotonic()
        self.decide_at_s = now + max(rollout.settings.interval_s, (now - began_s) / DECIDING_SHARE)
        if not decided.moves:
            return
        if decided.time_saved_s <= 0 and rollout.decide_lease().action != "Release":
            return  # the move only saves leases, and these would be held for the next phase
        if self.rule == "auto" and not self.are_taken():
            return  # this step goes without, to be compared
        rollout.result.decisions.append(f"{sum(len(move.requests) for move in decided.moves)} moved: {decided.reason}")
        for move in decided.moves:
            rollout.migrations.start(move)

    # ---- decisions ------------------------------------------------------------------------------------------------

    def choose_methods(self, requests: np.ndarray, token_log: TokenLog, source: int, target: int, reason: str) -> list[MigrationRequest]:
        """Request moves, each by the faster method for its context. A request without tokens has no KV to copy."""
        length, context = token_log.length[requests], (token_log.prompt + token_log.length)[requests]
        paged = (length > 0) & self._prefers_pages(context)
        parts = (requests[~paged], "prefill"), (requests[paged], "pages")
        return [MigrationRequest(part, source, target, reason, how) for part, how in parts if len(part)]

    def move_times(self) -> MoveTimes:
        """Return the seconds from the decision to the first token on the new engine.

        With any method, both engines must first finish their current steps. For a method without measurements, this fixed part is scaled
        from its seed by the same factor as the other method's.
        """
        terms = list(self._terms().values())
        factor = next((term.fixed_s / term.seed[0] for term in terms if term.records), 1.0)
        return MoveTimes(*((term.fixed_s * (1.0 if term.records else factor), term.per_unit_s) for term in terms))

    def _predict(self, context: np.ndarray | float) -> np.ndarray:
        return self.move_times().seconds(context)

    def _pause_s(self, context: np.ndarray) -> np.ndarray:
        """Return (n,) seconds that nine in ten pauses of contexts (n,) stay below, by the faster method of each."""
        predicted = self._predict(context)
        typical = predicted.mean(1).tolist()
        upper = [term.missed.interval(mean, PAUSE_LEVEL)[1] / mean for term, mean in zip(self._terms().values(), typical, strict=True)]
        return np.asarray(np.array(upper)[predicted.argmin(0)] * predicted.min(0))

    def _prefers_pages(self, context: np.ndarray) -> np.ndarray:
        """Return (n,) bool: for which contexts (n,), in tokens, copying pages is faster."""
        return np.asarray(self._predict(context).argmin(0) == 1)

    def _work_s(self, context: np.ndarray) -> np.ndarray:
        """Return the engine time (n,) for taking over contexts (n,): computing them, or copying in their pages."""
        page_s = self.pages.per_unit_s if self.pages is not None else 0.0
        return np.asarray(np.where(self._prefers_pages(context), page_s, self.token_s) * context)

    def prepare(
        self, lengths: np.ndarray, speed: Speed, second: float, token_s: float = 0.0, limit: float = np.inf, start_s: float = np.inf
    ) -> None:
        """Prepare for a rollout.

        Args:
            lengths: (n, S) joint draws of the responses' lengths, in tokens.
            second: Value of a second of rollout time, in slot-seconds.
            token_s: Engine time to prefill one token.
            limit: Maximum response length in tokens.
            start_s: Expected start time of a new engine.
        """
        self.has_failed, self.forecast, self.lengths = False, None, lengths
        self.speed, self.token_s, self.limit, self.start_s = speed, token_s, limit, start_s
        self.cost_weight = float(np.clip(1 / max(second, 1e-9), MIN_COST_WEIGHT, MAX_COST_WEIGHT))

    def decide(self, token_log: TokenLog, engines: list[int], steps: EngineSteps, leaving: Sequence[int] = ()) -> MigrationRequests:
        """Decide the moves to make now.

        `engines`: numbers of the available engines. `steps`: step records so far. `leaving`: engines whose requests stay until their
        node's notice ends. Moves only save time or leases, so after a failure the rollout continues without them.
        """
        if self.has_failed:
            return MigrationRequests()
        return self.safely("deciding on moves", lambda: self._decide(token_log, engines, steps, leaving), self._give_up)

    def _give_up(self) -> MigrationRequests:
        self.has_failed = True
        return MigrationRequests()

    def _decide(self, token_log: TokenLog, engines: list[int], steps: EngineSteps, leaving: Sequence[int]) -> MigrationRequests:
        live = np.flatnonzero(~token_log.finished & ~np.isin(token_log.owner, leaving))
        place = {number: at for at, number in enumerate(engines)}
        actor = np.array([place.get(number, -1) for number in token_log.owner.tolist()])
        if len(engines) < 2 or not len(live) or (actor[live] < 0).any():
            return MigrationRequests(reason="no other engine to move to")
        owner, new = actor[live], actor.copy()
        if self.rule == "tau":
            begun = np.bincount(actor[actor >= 0], minlength=len(engines))
            new[live] = cut_at_share(owner, begun, self.tau)
            saved_s, reason = 0.0, f"a share of {self.tau:g} has finished"
        else:
            best = self._best(token_log, live, owner, engines, self._slowdown(steps))
            new[live], saved_s, reason = best.actor, best.time_saved_s, best.reason
        changed = live[owner != new[live]]
        pairs = sorted(set(zip(actor[changed].tolist(), new[changed].tolist(), strict=True)))
        moves = tuple(
            move
            for a, b in pairs
            for move in self.choose_methods(changed[(actor[changed] == a) & (new[changed] == b)], token_log, engines[a], engines[b], reason)
        )
        return MigrationRequests(moves, max(0.0, saved_s), reason)

    def _best(self, token_log: TokenLog, live: np.ndarray, owner: np.ndarray, engines: list[int], slowdown: float) -> Moves:
        """Return the planner's best moves of the `live` requests, by the speed and the price of each engine.

        A pause is priced by what pauses have taken in this run at worst. Taking over contexts is also work for the target engine, during
        which all its sequences wait.
        """
        if self.forecast is None:
            self.forecast = Scenarios.from_matrix(self.lengths)
        left = self.forecast.left(token_log.length, token_log.finished, self.limit)[live]
        context = (token_log.prompt + token_log.length)[live].astype(float)
        fitted, prices = zip(*map(self.kind_of, engines), strict=True)
        speeds = tuple(Speed(slowdown * one.base_s, slowdown * one.per_seq_s, slowdown * one.per_ctx_s) for one in fitted)
        pause_s, work_s = self._pause_s(context), self._work_s(context)
        settings = Settings(self.cost_weight, len(engines), pause_s, work_s, speeds=speeds, prices=prices)
        return decide_moves(LiveState(left, context, owner, tuple(range(len(engines)))), speeds[0], settings)

    def _slowdown(self, steps: EngineSteps) -> float:
        """Return what the newest steps took, relative to the fitted speed: the first rollout has no fit, and machines vary."""
        if not steps:
            return 1.0
        pairs = [(s.token_s, self.speed.step_s(s.running, s.context_tokens)) for s in steps.newest(RECENT) if s.new_tokens <= s.running]
        return float(np.median([seconds / max(predicted, 1e-9) for seconds, predicted in pairs])) if pairs else 1.0

    def observe(self, context_tokens: float, seconds: float, how: str = "prefill") -> None:
        """Record a move. `how`: the chosen method, even if it fell back to the other one, which makes the chosen one look slower."""
        term = self.pages if how == "pages" else self.prefill
        if term is not None:
            term.observe(context_tokens, seconds)

    def state(self) -> JsonObject:
        """Return the fitted times of moves, for a checkpoint."""
        return {name: term.state() for name, term in self._terms().items()} if self.is_on else {}

    def restore(self, state: JsonObject) -> None:
        for name, term in self._terms().items():
            if name in state:
                term.restore(state[name])

    def _terms(self) -> dict[str, Term]:
        return {name: term for name, term in (("prefill", self.prefill), ("pages", self.pages)) if term is not None}

    def pauses(self) -> dict[str, Term]:
        """Return the times of moves by what they are, in words."""
        return {f"pause of a move by {name}": term for name, term in self._terms().items()}
