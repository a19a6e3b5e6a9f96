"""When to cut, what to move and where to, from live progress.

`decide_moves` is asked at every replan of a running rollout, simulated or real. It is stateless: everything it knows is in
its arguments, so that the same progress gives the same moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.speed import Speed
from placement.spread import Judged, best_split, judge
from placement.survival import Forecast, Outlook, calibrate, outlook

SURPRISE = 0.15  # share of sequences taken to be ones whose forecast says nothing
LEAST_GAIN = 0.002  # share of the score that a move must save, above what it costs
TRIES = 5  # actors looked at as givers and as takers when moves are chosen one by one
ROUNDS = 4  # single moves in one decision


@dataclass(frozen=True)
class LiveState:
    """Progress of a rollout. forecast: of all n sequences; generated (n,) tokens so far; finished (n,); actor (n,): where each
    one decodes, -1 for nowhere yet (ignored once finished); opened: actors whose lease is open; context_tokens: mean
    prompt + response tokens of the live sequences, for speeds that depend on it."""

    forecast: Forecast
    generated: np.ndarray
    finished: np.ndarray
    actor: np.ndarray
    opened: tuple[int, ...] = ()
    context_tokens: float = 0.0

    @property
    def live(self) -> np.ndarray:
        """Indices of the sequences that have not finished."""
        return np.flatnonzero(~self.finished)


@dataclass(frozen=True)
class Settings:
    """mu: weight of cost in time + mu·cost (s per actor-second); max_actors: that may be leased; migrate_s: seconds for which
    a moved sequence does not decode; start_s: seconds from lease to first token; surprise: see `outlook`; learn: correct
    the forecast by what this rollout shows."""

    mu: float
    max_actors: int
    migrate_s: float = 0.0
    start_s: float = 0.0
    surprise: float = SURPRISE
    learn: bool = True


@dataclass(frozen=True)
class Move:
    """Sequences (indices) that go from one actor (-1: from none, a first placement) to another, and why."""

    sequences: np.ndarray
    source: int
    target: int
    reason: str


@dataclass(frozen=True)
class Moves:
    """What to do now. actor (n,): where each live sequence belongs (-1 for finished ones); moves: the changes, by source and
    target; open, release: leases to take and to give back. time_saved_s, cost_saved: expected, against staying (0 for the
    first placement)."""

    actor: np.ndarray
    moves: tuple[Move, ...]
    open: tuple[int, ...]
    release: tuple[int, ...]
    time_saved_s: float
    cost_saved: float
    reason: str


def decide_moves(live: LiveState, speed: Speed, settings: Settings) -> Moves:
    """The moves with the least expected time + mu·cost, or none if staying is as good.

    Free moves: the best split of `best_split`, every time. Costly ones: starting from where the sequences are, the best of
    emptying an actor into another one, of taking the most critical sequences off the crowd, and of the whole new split, as
    long as the predicted saving exceeds what the move costs: migrate_s for the moved sequences, weighted by the
    probability that they are the last to end, and start_s of lease and delay for every actor that is opened.
    Raises ValueError when no sequence is live.
    """
    index = live.live
    if not len(index):
        raise ValueError("there is nothing to move: every sequence has finished")
    view = look(live, settings)
    per_seq_s = speed.per_seq_s + speed.per_ctx_s * live.context_tokens
    now = live.actor[index]
    split = best_split(
        view, speed.base_s, per_seq_s, settings.mu, settings.max_actors, opened=len(live.opened), start_s=settings.start_s
    )
    target = relabel(split.group, now, live.opened, settings.max_actors)
    if (now < 0).any():
        return _describe(live, index, target, None, split.judged, f"{split.groups} groups by criticality")
    search = _Search(view, now, speed.base_s, per_seq_s, settings, live.opened)
    stay = search.judged
    if settings.migrate_s == 0 and settings.start_s == 0:
        why = f"{len(index)} live on {split.groups} actors by criticality"
        return _describe(live, index, target, stay, split.judged, why)
    reasons = search.run(target)
    return _describe(live, index, search.actor, stay, search.judged, "; ".join(reasons) or "staying is as good")


def look(live: LiveState, settings: Settings) -> Outlook:
    """The outlook of the live sequences under the calibrated forecast."""
    known = calibrate(live.forecast, live.generated, live.finished) if settings.learn else live.forecast
    index = live.live
    return outlook(Forecast(known.mean_log[index], known.sd_log[index]), known, live.generated[index], settings.surprise)


def cut_at_share(live: LiveState, begun: np.ndarray, tau: float) -> np.ndarray:
    """The RLHFless paper's rule (arXiv 2602.22718) as one setting: actors of which a share of at least `tau` of the begun (m,)
    sequences has finished hand the rest to free slots elsewhere, and are released. A slot is free where a begun sequence has
    ended; receivers are taken from the highest-numbered actor down. Returns the new actor (n,) of each sequence."""
    index = live.live
    held = np.bincount(live.actor[index], minlength=len(begun))
    share = 1 - held / np.maximum(begun, 1)
    new, cut = live.actor.copy(), set()
    for a in range(len(begun)):
        others = [b for b in range(len(begun) - 1, -1, -1) if b != a and held[b] and b not in cut]
        free = {b: int(begun[b] - held[b]) for b in others}
        if not held[a] or share[a] < tau or sum(free.values()) < held[a]:
            continue
        receivers = [b for b in others for _ in range(free[b])]
        for i, b in zip(index[new[index] == a], receivers, strict=False):
            new[i] = b
            held[b] += 1
        held[a] = 0
        cut.add(a)
    return new


def relabel(group: np.ndarray, now: np.ndarray, opened: tuple[int, ...], max_actors: int) -> np.ndarray:
    """Actor numbers (n,) for groups 0 … m-1 so that many sequences stay where they are: largest overlap first, then open
    actors, then others. now (n,): present actor, -1 for none."""
    groups = int(group.max()) + 1
    overlap = np.zeros((groups, max_actors), int)
    placed = now >= 0
    np.add.at(overlap, (group[placed], now[placed]), 1)
    name, free = np.full(groups, -1), np.ones(max_actors, bool)
    for cell in np.argsort(-overlap, axis=None, kind="stable")[: int((overlap > 0).sum())]:
        g, a = divmod(int(cell), max_actors)
        if name[g] < 0 and free[a]:
            name[g], free[a] = a, False
    rest = sorted(np.flatnonzero(free).tolist(), key=lambda a: (a not in opened, a))
    name[name < 0] = rest[: int((name < 0).sum())]
    return name[group]


class _Search:
    """Single moves from the present placement, each taken only if it saves more than it costs."""

    def __init__(
        self, view: Outlook, actor: np.ndarray, base_s: float, per_seq_s: float, settings: Settings, opened: tuple[int, ...]
    ) -> None:
        self.view, self.settings, self.base_s, self.per_seq_s = view, settings, base_s, per_seq_s
        self.actor, self.opened = actor.copy(), set(opened)
        self.weight = np.maximum(view.critical, 0.5 / len(actor))  # even an uncritical sequence must not move for ever
        self.rows = np.concatenate([np.ones((len(actor), 1)), view.alive], 1)
        self.judged = self.of(self.actor)

    def of(self, actor: np.ndarray) -> Judged:
        order = np.argsort(actor, kind="stable")
        first = np.flatnonzero(np.r_[True, np.diff(actor[order]) > 0])
        alive = np.add.reduceat(self.rows[order], first, axis=0)
        return judge(alive, self.view.tokens, self.base_s, self.per_seq_s, self.settings.mu)

    def price(self, actor: np.ndarray) -> float:
        """What getting from the present placement to `actor` costs, in units of the score."""
        moved = actor != self.actor
        new = set(np.unique(actor[moved]).tolist()) - self.opened
        wait = self.settings.migrate_s * min(1.0, float(self.weight[moved].sum()))
        late = sum(float(self.weight[actor == a].sum()) for a in new)
        idle = len(new) * max(self.settings.start_s, self.settings.migrate_s)
        return wait + max(0.0, self.settings.start_s - self.settings.migrate_s) * min(1.0, late) + self.settings.mu * idle

    def run(self, target: np.ndarray) -> list[str]:
        reasons: list[str] = []
        for turn in range(ROUNDS):
            options = self.options()
            if not turn:
                options.append((target, "new split by criticality"))
            best, least = None, self.judged.score * (1 - LEAST_GAIN)
            for actor, why in options:
                judged = self.of(actor)
                score = judged.score + self.price(actor)
                if score < least:
                    best, least = (actor, judged, why), score
            if best is None:
                break
            saving = self.judged.score - best[1].score
            reasons.append(f"{best[2]}: saves {saving:.3g}, costs {self.price(best[0]):.3g}")
            self.opened |= set(np.unique(best[0]).tolist())
            self.actor, self.judged = best[0], best[1]
        return reasons

    def options(self) -> list[tuple[np.ndarray, str]]:
        actors, counts = np.unique(self.actor, return_counts=True)
        by_load = actors[np.argsort(counts, kind="stable")]
        found = []
        for a in by_load[:TRIES]:
            for b in by_load[: TRIES + 1]:
                if a != b:
                    found.append((np.where(self.actor == a, b, self.actor), f"actor {a} emptied into {b}"))
        spare = [a for a in range(self.settings.max_actors) if a not in set(actors.tolist())]
        spare.sort(key=lambda a: (a not in self.opened, a))
        takers = [int(a) for a in by_load[:2]] + spare[:1]
        for source in by_load[::-1][:TRIES]:
            mine = np.flatnonzero(self.actor == source)
            mine = mine[np.argsort(-self.view.critical[mine], kind="stable")]
            for count in (1, 4, 16, 64, 256):
                if count >= len(mine):
                    break
                for taker in takers:
                    if taker != source:
                        actor = self.actor.copy()
                        actor[mine[:count]] = taker
                        found.append((actor, f"the {count} most critical of actor {source} to {taker}"))
        return found


def _describe(
    live: LiveState, index: np.ndarray, target: np.ndarray, stay: Judged | None, then: Judged, reason: str
) -> Moves:
    actor = np.full(len(live.finished), -1)
    actor[index] = target
    now = live.actor[index]
    moves = []
    for source, to in sorted({(int(a), int(b)) for a, b in zip(now, target, strict=True) if a != b}):
        who = index[(now == source) & (target == to)]
        moves.append(Move(who, source, to, "first placement" if source < 0 else reason))
    used = set(np.unique(target).tolist())
    saved_s, saved = (0.0, 0.0) if stay is None else (stay.time_s - then.time_s, stay.cost - then.cost)
    return Moves(
        actor, tuple(moves), tuple(sorted(used - set(live.opened))), tuple(sorted(set(live.opened) - used)), saved_s, saved, reason
    )
