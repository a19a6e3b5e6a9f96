"""Decoding in virtual time: sequences advance together on actors, exactly by the speed model.

Between two calls everything is computed in closed form. Tokens are a fluid: a slice of time may end within a token. The
true lengths live here. Policies are shown a `View`, which does not contain them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from placement.speed.decode_speed import Speed
from placement.speed.drafted_speed import DraftedSpeed

UNPLACED = -1  # actor number of a sequence that no actor holds
BLOCK = 16  # free tokens per running sequence that admitting another one requires (one page of KV cache)


@dataclass(frozen=True)
class ActorLease:
    """One actor held from `from_s` to `to_s`. Every second of it is billed."""

    actor: int
    from_s: float
    to_s: float


@dataclass
class VirtualEngines:
    """State of a rollout. All arrays are (n,), one entry per sequence.

    lengths: true response tokens. prompts: prompt tokens. capacity: KV tokens an actor holds (None: no limit).
    """

    lengths: np.ndarray
    prompts: np.ndarray
    speed: Speed
    start_s: float = 0.0
    migrate_s: float = 0.0
    capacity: int | None = None
    time_s: float = 0.0
    moves: int = 0
    leases: list[ActorLease] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.lengths)
        self.generated = np.zeros(n)
        self.finished = np.zeros(n, bool)
        self.finish_s = np.full(n, np.nan)
        self.actor = np.full(n, UNPLACED)
        self.home = np.full(n, UNPLACED)  # the actor that holds the sequence's KV; UNPLACED before the first placement
        self.paused_until = np.zeros(n)
        self.admitted = np.zeros(n, np.int64)  # 0: waits for KV room, otherwise order of admission on its actor
        self.admissions = 0
        self.opened: dict[int, float] = {}  # actor → when its lease began
        self.ready: dict[int, float] = {}  # actor → when it can decode
        self.hold: frozenset[int] = frozenset()

    def place(self, actor: np.ndarray, hold: frozenset[int]) -> tuple[int, int, int]:
        """Put unfinished sequences on actors (n,), and keep the actors in `hold` even while empty.

        Every other empty actor is released now. A held one that is not open is opened. Returns (sequences moved, leases
        opened, leases closed).
        """
        live = ~self.finished
        new = np.where(live, actor, UNPLACED)
        needed = set(np.unique(new[new >= 0]).tolist()) | hold
        closing = [a for a in self.opened if a not in needed]
        for a in closing:
            self._close(a, self.time_s)
        opening = [a for a in sorted(needed) if a not in self.opened]
        for a in opening:
            self.opened[a] = self.time_s
            self.ready[a] = self.time_s + self.start_s
        changed = live & (new >= 0) & (new != self.home)
        moved = changed & (self.home != UNPLACED)
        self.paused_until[moved] = self.time_s + self.migrate_s
        self.admitted[changed | (live & (new < 0))] = 0
        self.home[changed] = new[changed]
        self.actor = new
        self.hold = hold
        self.moves += int(moved.sum())
        return int(moved.sum()), len(opening), len(closing)

    def advance(self, until_s: float) -> None:
        """Decode until `until_s`, or until no sequence is left, whichever is first."""
        while self.time_s < until_s and not self.finished.all():
            placed = ~self.finished & (self.actor >= 0)
            ready = self._ready_s()
            waits = np.maximum(self.paused_until, np.where(placed, ready[self.actor], np.inf))
            is_due = waits <= self.time_s
            later = waits[placed & ~is_due]
            end = min(until_s, float(later.min())) if len(later) else until_s
            runs = placed & is_due
            if self.capacity is not None:
                self._admit(runs)
                runs &= self.admitted > 0
            chosen = runs.nonzero()[0]
            if len(chosen):
                end = min(end, self._slice(chosen, end - self.time_s))
            self.time_s = end
        if self.finished.all():
            self.time_s = float(self.finish_s.max(initial=0.0))

    def finish(self) -> None:
        """Close every open lease now."""
        for a in list(self.opened):
            self._close(a, self.time_s)

    def _ready_s(self) -> np.ndarray:
        ready = np.full(int(self.actor.max(initial=0)) + 2, np.inf)  # the last entry stands for UNPLACED
        for a, at in self.ready.items():
            if a < len(ready) - 1:
                ready[a] = at
        return ready

    def _close(self, actor: int, at_s: float) -> None:
        self.leases.append(ActorLease(actor, self.opened.pop(actor), at_s))
        del self.ready[actor]
        # A sequence that waits without an actor loses its KV with the lease: coming back is a move, wherever it goes.
        self.home[(self.home == actor) & ~self.finished & (self.actor == UNPLACED)] = -2

    def _slice(self, chosen: np.ndarray, seconds: float) -> float:
        """Decode the sequences in `chosen` for at most `seconds`. Returns the time at which the slice ended."""
        left = self.lengths[chosen] - self.generated[chosen]
        order = np.lexsort((left, self.actor[chosen]))
        chosen, left = chosen[order], left[order]
        actor = self.actor[chosen]
        begins = np.ones(len(chosen), bool)
        begins[1:] = actor[1:] != actor[:-1]
        first = begins.nonzero()[0]
        size = np.empty_like(first)
        size[:-1], size[-1] = first[1:] - first[:-1], len(chosen) - first[-1]
        running = (first + size).repeat(size) - np.arange(len(chosen))
        before = np.empty(len(chosen))  # tokens made since the slice began, as each phase begins
        before[1:] = left[:-1]
        before[first] = 0.0
        speed = self.speed.plain if isinstance(self.speed, DraftedSpeed) else self.speed
        rate = speed.base_s + speed.per_seq_s * running
        if speed.per_ctx_s:
            context = self.prompts[chosen] + self.generated[chosen]
            total = np.cumsum(context)
            ends = total[first + size - 1].repeat(size)
            rate = rate + speed.per_ctx_s * (ends - total + context)
        growth = speed.per_ctx_s * running  # how much a step slows with each token made by all that run
        if isinstance(self.speed, DraftedSpeed):
            rate, growth = self.speed.per_token(running, rate, growth)
        phase = rate * (left - before) + growth / 2 * (np.square(left) - np.square(before))
        total = np.cumsum(phase)
        done = total - (total[first] - phase[first]).repeat(size)  # seconds after which each sequence ends
        if self.capacity is not None:
            seconds = min(seconds, self._event(chosen, left, done, rate, growth, first, size))
        over = done <= seconds * (1 + 1e-12) + 1e-15
        ended = np.add.reduceat(over, first)
        # tokens of each actor's unfinished sequences: up to the last end, plus the begun part of the next phase
        part = ended < size
        at = (first + ended)[part]
        rest = np.maximum(seconds - (done[at] - phase[at]), 0.0)
        speed_now = rate[at] + growth[at] * before[at]
        made = np.zeros(len(first))
        made[part] = before[at] + 2 * rest / (speed_now + np.sqrt(np.square(speed_now) + 2 * growth[at] * rest))
        self.generated[chosen] = np.where(over, self.lengths[chosen], self.generated[chosen] + made.repeat(size))
        over_now = chosen[over]
        self.finished[over_now] = True
        self.finish_s[over_now] = self.time_s + done[over]
        for k in (~part).nonzero()[0]:
            a = int(actor[first[k]])
            if a not in self.hold and not (~self.finished & (self.actor == a)).any():
                self._close(a, self.time_s + float(done[first[k] + size[k] - 1]))
        return self.time_s + seconds

    def _admit(self, runs: np.ndarray) -> None:
        """Admit waiting sequences to their actor's KV cache while it has room, and evict the youngest where it has none."""
        assert self.capacity is not None
        context = self.prompts + self.generated
        actor, waits = self.actor[runs], self.admitted[runs] == 0
        held = np.bincount(actor, np.where(waits, 0.0, context[runs]))
        inside = np.bincount(actor, ~waits)
        full = (held + 1e-6 * inside >= self.capacity) & (inside > 1)
        for a in (full | (np.bincount(actor, waits) > 0)).nonzero()[0]:
            mine = (runs & (self.actor == a)).nonzero()[0]
            self._admit_to(mine, context)

    def _admit_to(self, mine: np.ndarray, context: np.ndarray) -> None:
        """Do the same for the sequences of one actor. context (n,): tokens that each sequence holds."""
        assert self.capacity is not None
        inside = mine[self.admitted[mine] > 0]
        inside = inside[self.admitted[inside].argsort()]
        held = context[inside].sum()
        while len(inside) > 1 and held + 1e-6 * len(inside) >= self.capacity:
            held -= context[inside[-1]]
            self.admitted[inside[-1]] = 0
            inside = inside[:-1]
        waiting = mine[self.admitted[mine] == 0]
        room = np.cumsum(context[waiting]) + held + BLOCK * (len(inside) + 1 + np.arange(len(waiting))) <= self.capacity
        enter = waiting[: int(np.argmin(room)) if not room.all() else len(room)]
        if not len(inside) and not len(enter):
            enter = waiting[:1]  # alone it always fits: checked when the rollout began
        self.admitted[enter] = self.admissions + 1 + np.arange(len(enter))
        self.admissions += len(enter)

    def _event(
        self,
        chosen: np.ndarray,
        left: np.ndarray,
        done: np.ndarray,
        rate: np.ndarray,
        growth: np.ndarray,
        first: np.ndarray,
        size: np.ndarray,
    ) -> float:
        """Seconds until, on some actor whose KV cache is short of room, a sequence ends or the cache is full."""
        assert self.capacity is not None
        context = self.prompts[chosen] + self.generated[chosen]
        held = np.add.reduceat(context, first)
        free = self.capacity - held
        short = np.add.reduceat(left, first) > free
        has_waiting = np.zeros(int(self.actor.max()) + 1, bool)
        has_waiting[self.actor[~self.finished & (self.actor >= 0) & (self.admitted == 0)]] = True
        short |= has_waiting[self.actor[chosen[first]]]
        if not short.any():
            return np.inf
        tokens = np.maximum(free / size, 0.0)
        full = np.where(tokens < left[first], rate[first] * tokens + growth[first] / 2 * np.square(tokens), done[first])
        return float(np.where(size == 1, done[first], full)[short].min())
