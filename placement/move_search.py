"""Single moves from the present placement of live sequences, by what they save and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.spread import LAWFUL, Judged, judge, judge_each
from placement.survival import Outlook

LEAST_GAIN = 0.002  # share of the score that a move must save, above what it costs
TRIES = 5  # actors looked at as givers and as takers when moves are chosen one by one
ROUNDS = 4  # single moves in one decision
BATCHES = (1, 4, 16, 64, 256)  # how many of the most critical are tried off the crowd


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
class Option:
    """A change of placement: the sequences that move (positions among the live) and the actor that takes them."""

    who: np.ndarray
    taker: int
    reason: str


class MoveSearch:
    """Single moves from the present placement, each taken only if it saves more than it costs.

    A placement is judged by one row per actor (its expected survivors), so that trying a move costs nothing that grows with
    the number of sequences.
    """

    def __init__(
        self, view: Outlook, actor: np.ndarray, base_s: float, per_seq_s: float, settings: Settings, opened: tuple[int, ...]
    ) -> None:
        self.view, self.settings, self.base_s, self.per_seq_s = view, settings, base_s, per_seq_s
        self.actor, self.opened = actor.copy(), set(opened)
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
        migrate_s, start_s = self.settings.migrate_s, self.settings.start_s
        self.paused = self._delayed(migrate_s)
        self.late = self._delayed(start_s) if start_s > migrate_s else self.paused
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

    def best(self) -> tuple[float, Judged, dict[int, np.ndarray], Option] | None:
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

    def options(self) -> list[tuple[Option, np.ndarray]]:
        """Changes worth a look, each with the survivors (G+1,) that move: a lightly loaded actor emptied into another, and the most
        critical sequences of a crowded one taken to a lightly loaded or a spare one."""
        by_load = sorted(self.rows, key=lambda a: (self.rows[a][0], a))
        held = {a: np.flatnonzero(self.actor == a) for a in {*by_load[:TRIES], *by_load[-TRIES:]}}
        found = []
        for a in by_load[:TRIES]:
            for b in by_load[: TRIES + 1]:
                if a != b:
                    found.append((Option(held[a], b, f"actor {a} emptied into {b}"), self.rows[a]))
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
                        found.append((Option(mine[:count], taker, why), gone))
        return found
