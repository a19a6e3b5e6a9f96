"""Decide which live sequences move to which actor, by joint draws of what they have left.

`decide_moves` is called at every replan of a running rollout, simulated or real. It is stateless: the same progress gives the same moves.
A move pauses its sequence and makes its new actor compute or copy a context. So it must pay in nearly all draws, not only in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.speed.decode_speed import Speed

CAUTION = 0.15  # share of the draws in which a change may save less than its bound says
MIN_GAIN = 0.002  # share of the score that a change must save
RATIOS = (1.0, 2.0, 4.0, 8.0)  # largest over smallest share of the sequences that an actor gets
MUST_GAIN = 0.01  # share of the score that unequal shares must save, as forecasts may know less than they say
COUNTS = (1, 4, 16, 64)  # how many of an actor's longest sequences are tried elsewhere
TRIED = 4  # actors tried as sources and as targets
MAX_CHANGES = 4  # changes in one decision


@dataclass(frozen=True)
class LiveState:
    """Progress of a rollout: its unfinished sequences.

    left (n, S): tokens that each still gets, in joint draws. context (n,): tokens that it has, its prompt included. actor (n,): where it
    decodes, -1 for nowhere yet. opened: actors with an open lease.
    """

    left: np.ndarray
    context: np.ndarray
    actor: np.ndarray
    opened: tuple[int, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What moves cost and how they are weighed.

    cost_weight: weight of cost in time + cost_weight · cost (seconds per actor-second). max_actors: actors that may be leased. pause_s
    (n,) or one: seconds for which a moved sequence does not decode, at worst. work_s (n,) or one: seconds for which its new actor does not
    decode, because it takes over the context. start_s: seconds from lease to first token of a new actor. speeds, prices (max_actors,): of
    each actor, if they differ. Prices are relative to an actor-second of weight 1.
    """

    cost_weight: float
    max_actors: int
    pause_s: np.ndarray | float = 0.0
    work_s: np.ndarray | float = 0.0
    start_s: float = 0.0
    speeds: tuple[Speed, ...] = ()
    prices: tuple[float, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether nothing has a price, as only in simulations."""
        return self.start_s == 0 and not np.any(self.pause_s) and not np.any(self.work_s)


@dataclass(frozen=True)
class Moves:
    """Where each sequence belongs, actor (n,), and why. time_saved_s: mean saving against staying, 0 for a first placement."""

    actor: np.ndarray
    time_saved_s: float
    reason: str


def decide_moves(live: LiveState, speed: Speed, settings: Settings) -> Moves:
    """Find moves that lower time + cost_weight · cost, or return the present actors.

    An actor takes base · the longest of its sequences + the work of all, in each draw. Time is that of the slowest actor, and cost the sum.
    speed: of every actor, unless `settings.speeds` has others. A move then counts with the speeds of both actors.

    Sequences that have no actor yet, and all if moves are free, are spread over as many actors as the square-root law asks for
    (`square_root_law`). Shares are equal, or grow geometrically from those that probably have most left, if that is better by `MUST_GAIN`.
    If moves cost something, one change after the other is tried: to empty an actor into another one, and to move the longest sequences of
    a slow actor to a fast or a new one. A change is made if it saves something in all but a share `CAUTION` of the draws.

    Raises ValueError if no sequence is live.
    """
    if not len(live.left):
        raise ValueError("there is nothing to move: every sequence has finished")
    search = MoveSearch(live, speed, settings)
    stay = search.actor.copy()
    if settings.is_free or (live.actor < 0).any():
        return search.spread()
    reasons = search.run()
    before, after = search.seconds(stay), search.seconds(search.actor)
    saved_s = float((before.max(0) - after.max(0)).mean())
    return Moves(search.actor, saved_s, "; ".join(reasons) or "staying is as good")


def square_root_law(live: int, ratio: float, cost_weight: float) -> int:
    """Return the actors for `live` sequences: ceil(sqrt(ratio · live / cost_weight)), ratio = per_seq / base.

    If all sequences advance together on m actors, a step takes base + per_seq·live/m and costs m·base + per_seq·live.
    This m minimises time + cost_weight · cost.
    """
    return int(np.ceil(np.sqrt(ratio * live / cost_weight)))


class MoveSearch:
    """Changes the present placement step by step. A placement has one row of longest tokens and of work per actor, each (S,)."""

    def __init__(self, live: LiveState, speed: Speed, settings: Settings) -> None:
        self.live, self.speed, self.settings, self.actor = live, speed, settings, live.actor.copy()
        kinds = list(dict.fromkeys(settings.speeds)) or [speed]
        self.kind = np.array([kinds.index(own) for own in settings.speeds] or [0] * settings.max_actors)  # of each actor
        self.base_s = np.array([max(kind.base_s, 1e-9) for kind in kinds])
        self.price = np.array(settings.prices or (1.0,) * settings.max_actors)[:, None]
        work = [kind.per_seq_s * live.left for kind in kinds]
        for k, kind in enumerate(kinds):
            if kind.per_ctx_s:
                work[k] = work[k] + kind.per_ctx_s * live.left * (live.context[:, None] + live.left / 2)
        n = len(live.left)
        pause = np.broadcast_to(settings.pause_s, n)[:, None]
        # by kind: the work of each sequence there, the same after a move, and the tokens then, a pause as tokens that it would make
        self.work = np.array(work)
        self.more = self.work + np.broadcast_to(settings.work_s, n)[:, None]
        self.late = np.array([live.left + pause / base_s for base_s in self.base_s])
        self.rank = np.argsort(-live.left.mean(1), kind="stable")

    def seconds(self, actor: np.ndarray) -> np.ndarray:
        """Return (actors, S) seconds of each actor, with the price of what has moved."""
        moved = (actor != self.live.actor)[:, None]
        kind, every = self.kind[actor], np.arange(len(actor))
        tokens = np.where(moved, self.late[kind, every], self.live.left)
        work = np.where(moved, self.more[kind, every], self.work[kind, every])
        order = np.argsort(actor, kind="stable")
        first = np.flatnonzero(np.diff(actor[order], prepend=-2))
        found = np.zeros((self.settings.max_actors, tokens.shape[1]))
        used = actor[order][first]
        found[used] = self.base_s[self.kind[used], None] * np.maximum.reduceat(tokens[order], first) + np.add.reduceat(work[order], first)
        if self.settings.start_s:
            found[[a for a in used.tolist() if a not in self.live.opened]] += self.settings.start_s
        return found

    def score(self, seconds: np.ndarray) -> np.ndarray:
        """Return (S,) time + cost_weight · cost."""
        return np.asarray(seconds.max(0) + self.settings.cost_weight * (self.price * seconds).sum(0))

    def spread(self) -> Moves:
        """Place all sequences anew, on the actors of the square-root law."""
        live, n = self.live, len(self.actor)
        ratio = (self.speed.per_seq_s + self.speed.per_ctx_s * float(live.context.mean())) / max(self.speed.base_s, 1e-12)
        most = min(self.settings.max_actors, n, len(live.opened) or n)
        m = int(np.clip(square_root_law(n, ratio, self.settings.cost_weight), 1, most))
        # What a sequence's own draws say of it by chance must not choose its place and judge that place too.
        rank, fresh = np.argsort(-np.log(live.left[:, ::2]).mean(1), kind="stable"), slice(1 if live.left.shape[1] > 1 else 0, None, 2)
        best, least, chosen = live.actor, np.inf, RATIOS[0]
        for ratio in RATIOS if m > 1 else RATIOS[:1]:
            share = np.geomspace(1.0, ratio, m).cumsum()
            group = np.empty(n, int)
            # Equal shares keep the given order, in which responses to one prompt are together: they are alike.
            group[rank if ratio > 1 else np.arange(n)] = np.searchsorted(np.round(share / share[-1] * n)[:-1], np.arange(n), side="right")
            target = relabel(np.unique(group, return_inverse=True)[1], live.actor, live.opened, self.settings.max_actors)
            score = float(self.score(self.seconds(target)[:, fresh]).mean())
            if score < least * (1 - MUST_GAIN):
                best, least, chosen = target, score, ratio
        return Moves(best, 0.0, f"{n} sequences on {m} actors, in " + ("equal shares" if chosen == 1 else f"shares of 1 to {chosen:g}"))

    def run(self) -> list[str]:
        """Make changes while one pays, and return the reasons."""
        reasons = list[str]()
        while len(reasons) < MAX_CHANGES:
            now = self.seconds(self.actor)
            before, best = self.score(now), (0.0, 0.0, np.zeros(0, int), 0, "")
            for moved, target, reason in self.changes(now):
                saved = before - self.score(self.changed(now, moved, target))
                bound = min(float(np.quantile(saved, CAUTION)), float(saved.mean()))
                if bound > max(best[0], MIN_GAIN * float(before.mean())):
                    best = bound, float(saved.mean()), moved, target, reason
            if not best[0]:
                break
            self.actor[best[2]] = best[3]
            reasons.append(f"{best[4]}: saves {best[1]:.3g} in the mean, at least {best[0]:.3g}")
        return reasons

    def changes(self, now: np.ndarray) -> list[tuple[np.ndarray, int, str]]:
        """List changes to try: the sequences that move, their new actor, and what this is."""
        load = now.mean(1)
        used = sorted(set(self.actor.tolist()), key=lambda a: load[a])
        ranked = self.rank
        held = {a: ranked[self.actor[ranked] == a] for a in {*used[:TRIED], *used[-TRIED:]}}
        spare = [a for a in range(self.settings.max_actors) if a not in used]
        spare.sort(key=lambda a: (a not in self.live.opened, a))
        found = [(held[a], b, f"actor {a} emptied into {b}") for a in used[:TRIED] for b in used[: TRIED + 1] if a != b]
        for a in used[-TRIED:]:
            for count in COUNTS:
                if count < len(held[a]):
                    for b in [*used[:2], *spare[:1]]:
                        if a != b:
                            found.append((held[a][:count], b, f"the {count} longest of actor {a} to {b}"))
        return found

    def changed(self, now: np.ndarray, moved: np.ndarray, target: int) -> np.ndarray:
        """Return the seconds of all actors after a change, of which two rows differ from `now`."""
        source = int(self.actor[moved[0]])
        found, is_moved = now.copy(), np.zeros(len(self.actor), bool)
        is_moved[moved] = True
        for a, members in ((source, (self.actor == source) & ~is_moved), (target, (self.actor == target) | is_moved)):
            at, kind = np.flatnonzero(members), self.kind[a]
            priced = (is_moved | (self.actor != self.live.actor))[at, None]
            tokens = np.where(priced, self.late[kind, at], self.live.left[at])
            work = np.where(priced, self.more[kind, at], self.work[kind, at])
            found[a] = self.base_s[kind] * tokens.max(0) + work.sum(0) if len(at) else 0.0
            if len(at) and a not in self.live.opened:
                found[a] += self.settings.start_s
        return found


def cut_at_share(actor: np.ndarray, begun: np.ndarray, tau: float) -> np.ndarray:
    """Apply the local cut of the RLHFless paper (arXiv 2602.22718). Returns the new actor (n,) of each live sequence.

    An actor of whose begun (m,) sequences a share of at least `tau` has finished hands the rest to free slots elsewhere and is released. A
    slot is free where a begun sequence has ended. Receivers are taken from the highest-numbered actor down. actor (n,): present ones.
    """
    held, new = np.bincount(actor, minlength=len(begun)), actor.copy()
    for a in np.flatnonzero((held > 0) & (1 - held / np.maximum(begun, 1) >= tau)):
        free = np.where(held > 0, begun - held, 0)
        free[a] = 0
        if free.sum() >= held[a]:
            receivers = np.repeat(np.arange(len(begun))[::-1], free[::-1])[: held[a]]
            new[new == a] = receivers
            held += np.bincount(receivers, minlength=len(begun))
            held[a] = 0
    return new


def relabel(group: np.ndarray, now: np.ndarray, opened: tuple[int, ...], max_actors: int) -> np.ndarray:
    """Number groups 0 … m-1 as actors so that many sequences stay where they are. Returns actors (n,).

    Largest overlap comes first, then open actors, then others. now (n,): present actor, -1 for none.
    """
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
