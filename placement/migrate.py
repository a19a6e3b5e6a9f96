"""When to cut, what to move and where to, from live progress.

`decide_moves` is asked at every replan of a running rollout, simulated or real. It is stateless: everything it knows is in
its arguments, so that the same progress gives the same moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.siblings import by_siblings
from placement.speed import Speed
from placement.spread import LAWFUL, Judged, best_split, even_split, judge, judge_each
from placement.survival import Forecast, Outlook, calibrate, outlook, surprise_of

FREAKS = 0.1  # share of sequences that may follow no forecast of their own while forecasts are calibrated
DARK = 0.8  # share of sequences in the dark from which order by criticality is worth less than what its errors cost
LEAST_GAIN = 0.002  # share of the score that a move must save, above what it costs
TRIES = 5  # actors looked at as givers and as takers when moves are chosen one by one
ROUNDS = 4  # single moves in one decision
BATCHES = (1, 4, 16, 64, 256)  # how many of the most critical are tried off the crowd


@dataclass(frozen=True)
class LiveState:
    """Progress of a rollout. forecast: of all n sequences; generated (n,) tokens so far; finished (n,); actor (n,): where each
    one decodes, -1 for nowhere yet (ignored once finished); opened: actors whose lease is open; context_tokens: mean
    prompt + response tokens of the live sequences, for speeds that depend on it. group (n,): the prompt of each, and
    shared: the share of the forecasts' error that those of one prompt have in common (None: not known). limit: tokens at which
    every response is cut."""

    forecast: Forecast
    generated: np.ndarray
    finished: np.ndarray
    actor: np.ndarray
    opened: tuple[int, ...] = ()
    context_tokens: float = 0.0
    group: np.ndarray | None = None
    shared: float = 0.0
    limit: float = np.inf

    @property
    def live(self) -> np.ndarray:
        """Indices of the sequences that have not finished."""
        return np.flatnonzero(~self.finished)


@dataclass(frozen=True)
class Settings:
    """mu: weight of cost in time + mu·cost (s per actor-second); max_actors: that may be leased; migrate_s: seconds for which
    a moved sequence does not decode; start_s: seconds from lease to first token; surprise: see `outlook`, from what the
    forecast tells where none is given (`surprise_of`); learn: correct
    the forecast by what this rollout shows."""

    mu: float
    max_actors: int
    migrate_s: float = 0.0
    start_s: float = 0.0
    surprise: float | None = None
    learn: bool = True

    @property
    def merging(self) -> float:
        """How leases are expected to be given up (`judge_each`). Free moves put everybody anew at every decision. Where a move
        costs something a merge comes when it pays, and to count on more of it made each decision put it off to the
        next: on log-normal lengths, moves of 0.1 s and starts of 0.3 s, time + μ·cost was 3 % more."""
        return 1.0 if self.migrate_s == self.start_s == 0 else LAWFUL


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

    The split aimed at is that of `best_split`, or where most forecasts are taken to say nothing (more than DARK) an even one, as
    consolidation has it. Free moves: that split, every time. Costly ones: starting from where the sequences are, the best of
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
    if view.surprise > DARK:
        split = even_split(view, speed.base_s, per_seq_s, settings.mu, settings.max_actors)
    else:
        split = best_split(
            view, speed.base_s, per_seq_s, settings.mu, settings.max_actors, opened=len(live.opened), start_s=settings.start_s,
            merging=settings.merging,
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
    known = live.forecast
    ended = live.finished & (live.generated < live.limit)  # one that was cut would have gone on
    if settings.learn:
        known = calibrate(known, live.generated, ended, surprise=FREAKS)
    index = live.live
    surprise = settings.surprise
    if surprise is None:
        seen = live.generated if settings.learn else np.zeros_like(live.generated)
        surprise = surprise_of(known, seen, ended)
    own = known
    if settings.learn and live.group is not None:
        own = by_siblings(known, live.generated, ended, live.group, live.shared)
    return outlook(Forecast(own.mean_log[index], own.sd_log[index]), known, live.generated[index], surprise, live.limit)


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


@dataclass(frozen=True)
class _Option:
    """A change of placement: the sequences that move (positions among the live) and the actor that takes them."""

    who: np.ndarray
    taker: int
    reason: str


class _Search:
    """Single moves from the present placement, each taken only if it saves more than it costs.

    A placement is judged by one row per actor (its expected survivors), so that trying a move costs nothing that grows with
    the number of sequences.
    """

    def __init__(
        self, view: Outlook, actor: np.ndarray, base_s: float, per_seq_s: float, settings: Settings, opened: tuple[int, ...]
    ) -> None:
        self.view, self.settings, self.base_s, self.per_seq_s = view, settings, base_s, per_seq_s
        self.actor, self.opened = actor.copy(), set(opened)
        self.paused, self.late = (self._delayed(delay_s) for delay_s in (settings.migrate_s, max(settings.start_s, settings.migrate_s)))
        self.rows = self.sums(self.actor)
        self.judged = self.judge(self.rows)

    def sums(self, actor: np.ndarray) -> dict[int, np.ndarray]:
        """Expected survivors (G+1,) of each actor in use, now and along the grid."""
        order = np.argsort(actor, kind="stable")
        first = np.flatnonzero(np.r_[True, np.diff(actor[order]) > 0])
        alive = np.add.reduceat(self.view.alive[order], first, axis=0)
        count = np.diff(np.r_[first, len(actor)])
        return {int(actor[order[k]]): np.r_[float(count[at]), alive[at]] for at, k in enumerate(first)}

    def judge(self, rows: dict[int, np.ndarray]) -> Judged:
        every = np.stack(list(rows.values()))
        return judge(every, self.view.tokens, self.base_s, self.per_seq_s, self.settings.mu, self.settings.merging)

    def _delayed(self, delay_s: float) -> np.ndarray:
        """(n,): the share of a pause of so many seconds that the end is later for it: ∫ P(last | late by u) du / delay_s, by the
        trapezoid. Of those that are sure to end at the same time whichever pauses is the last, and had it stayed, any of them."""
        token_s = self.base_s + self.per_seq_s * len(self.actor) / max(1, len(set(self.actor.tolist())))
        shares = (self.view.critical + self.view.last(delay_s / token_s)) / 2
        return np.maximum(shares, 0.5 / len(self.actor))  # even an uncritical sequence must not move for ever

    def price(self, who: np.ndarray, fresh: np.ndarray, new: int) -> float:
        """Cost of a change in units of the score. who: what moves, of it `fresh` (bool) to actors that are opened, `new` of them."""
        settings = self.settings
        start_s = max(settings.start_s, settings.migrate_s)
        wait_s = settings.migrate_s * min(1.0, float(self.paused[who[~fresh]].sum()))
        return max(wait_s, start_s * min(1.0, float(self.late[who[fresh]].sum()))) + settings.mu * new * start_s

    def run(self, target: np.ndarray) -> list[str]:
        """Take the best change while one pays, the whole new split `target` among the first; returns the reasons."""
        moved = np.flatnonzero(target != self.actor)
        fresh = set(np.unique(target).tolist()) - self.opened
        price = self.price(moved, np.isin(target[moved], list(fresh)), len(fresh))
        judged = self.judge(self.sums(target))
        reasons: list[str] = []
        found = self.best()
        whole = judged.score + price
        if whole < min(self.limit(), found[0] if found else np.inf):
            reasons.append(f"new split by criticality: saves {self.judged.score - judged.score:.3g}, costs {price:.3g}")
            self.actor, self.rows, self.judged = target, self.sums(target), judged
            return reasons
        while found and found[0] < self.limit() and len(reasons) < ROUNDS:
            score, judged, rows, option = found
            saved = self.judged.score - judged.score
            reasons.append(f"{option.reason}: saves {saved:.3g}, costs {score - judged.score:.3g}")
            self.actor[option.who] = option.taker
            self.opened.add(option.taker)
            self.rows, self.judged = rows, judged
            found = self.best()
        return reasons

    def limit(self) -> float:
        return self.judged.score * (1 - LEAST_GAIN)

    def best(self) -> tuple[float, Judged, dict[int, np.ndarray], _Option] | None:
        """The change with the least score and price together: (that sum, the outcome, its rows, the change)."""
        found = self.options()
        if not found:
            return None
        names = [*self.rows, None]  # the last place is that of an actor that is opened
        place = {name: at for at, name in enumerate(names)}
        rows = np.stack([*self.rows.values(), np.zeros(len(self.view.tokens) + 1)])
        tried = np.repeat(rows[None], len(found), axis=0)
        every = np.arange(len(found))
        gone = np.stack([taken for _, taken in found])
        tried[every, [place[int(self.actor[option.who[0]])] for option, _ in found]] -= gone
        tried[every, [place.get(option.taker, len(names) - 1) for option, _ in found]] += gone
        used = tried[:, :, 0] >= 0.5
        count = used.sum(1)
        first = np.cumsum(count) - count
        time_s, cost = judge_each(tried[used], first, self.view.tokens, self.base_s, self.per_seq_s, self.settings.merging)
        score = time_s + self.settings.mu * cost
        price = np.empty(len(found))
        for k, (option, _) in enumerate(found):
            new = option.taker not in self.opened
            price[k] = self.price(option.who, np.full(len(option.who), new), int(new))
        k = int(np.argmin(score + price))
        option = found[k][0]
        left = {option.taker if name is None else name: tried[k, at] for at, name in enumerate(names) if used[k, at]}
        return float(score[k] + price[k]), Judged(float(time_s[k]), float(cost[k]), float(score[k])), left, option

    def options(self) -> list[tuple[_Option, np.ndarray]]:
        """Changes worth a look, each with the survivors (G+1,) that move: a lightly loaded actor emptied into another, and the most
        critical sequences of a crowded one taken to a lightly loaded or a spare one."""
        by_load = sorted(self.rows, key=lambda a: (self.rows[a][0], a))
        held = {a: np.flatnonzero(self.actor == a) for a in {*by_load[:TRIES], *by_load[-TRIES:]}}
        found = []
        for a in by_load[:TRIES]:
            for b in by_load[: TRIES + 1]:
                if a != b:
                    found.append((_Option(held[a], b, f"actor {a} emptied into {b}"), self.rows[a]))
        spare = [a for a in range(self.settings.max_actors) if a not in self.rows]
        spare.sort(key=lambda a: (a not in self.opened, a))
        for source in by_load[-TRIES:]:
            mine = held[source][np.argsort(-self.view.critical[held[source]], kind="stable")][: BATCHES[-1]]
            survivors = np.cumsum(self.view.alive[mine], axis=0)
            for count in BATCHES:
                if count >= len(held[source]):
                    break
                gone = np.r_[float(count), survivors[count - 1]]
                for taker in [*by_load[:2], *spare[:1]]:
                    if taker != source:
                        why = f"the {count} most critical of actor {source} to {taker}"
                        found.append((_Option(mine[:count], taker, why), gone))
        return found


def _describe(
    live: LiveState, index: np.ndarray, target: np.ndarray, stay: Judged | None, then: Judged, reason: str
) -> Moves:
    actor = np.full(len(live.finished), -1)
    actor[index] = target
    now = live.actor[index]
    changed = np.flatnonzero(now != target)
    changed = changed[np.lexsort((target[changed], now[changed]))]
    pair = np.stack([now[changed], target[changed]], 1)
    ends = np.flatnonzero((np.diff(pair, axis=0) != 0).any(1)) + 1
    moves = [
        Move(index[who], int(now[who[0]]), int(target[who[0]]), "first placement" if now[who[0]] < 0 else reason)
        for who in np.split(changed, ends) if len(who)
    ]
    used = set(np.unique(target).tolist())
    saved_s, saved = (0.0, 0.0) if stay is None else (stay.time_s - then.time_s, stay.cost - then.cost)
    return Moves(
        actor, tuple(moves), tuple(sorted(used - set(live.opened))), tuple(sorted(set(live.opened) - used)), saved_s, saved, reason
    )
