"""When to cut, what to move and where to, from live progress.

`decide_moves` is asked at every replan of a running rollout, simulated or real. It is stateless: everything it knows is in
its arguments, so that the same progress gives the same moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.move_search import MoveSearch, Settings
from placement.siblings import by_siblings
from placement.speed import Speed
from placement.spread import Judged, best_split, even_split
from placement.survival import Forecast, Outlook, calibrate, outlook, surprise_of

FREAKS = 0.1  # share of sequences that may follow no forecast of their own while forecasts are calibrated
DARK = 0.8  # share of sequences in the dark from which order by criticality is worth less than what its errors cost


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
    search = MoveSearch(view, now, speed.base_s, per_seq_s, settings, live.opened)
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
