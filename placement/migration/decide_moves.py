"""Decide which live sequences move to which actor, from live progress.

`decide_moves` is called at every replan of a running rollout, simulated or real. It is stateless: the same progress
gives the same moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.forecast.group_conditioning import condition_on_siblings
from placement.forecast.remaining_length import Forecast, RemainingLengths, calibrate, estimate_uninformative_share, predict_remaining
from placement.migration.load_split import SplitEstimate, best_split, even_split
from placement.migration.move_search import MoveSearch, Settings
from placement.speed.decode_speed import Speed

OUTLIER_SHARE = 0.1  # share of outliers that calibration allows for
EVEN_SPLIT_SHARE = 0.8  # share of uninformative forecasts above which ordering by criticality costs more than it gains


@dataclass(frozen=True)
class LiveState:
    """Progress of a rollout.

    forecast: of all n sequences. generated (n,): tokens so far. finished (n,). actor (n,): where each sequence decodes,
    -1 for nowhere yet (ignored once finished). opened: actors with an open lease. context_tokens: mean prompt +
    response tokens of the live sequences. group (n,): the prompt of each sequence. group_correlation: share of the
    forecast error that responses to one prompt have in common. limit: tokens at which every response is cut.
    """

    forecast: Forecast
    generated: np.ndarray
    finished: np.ndarray
    actor: np.ndarray
    opened: tuple[int, ...] = ()
    context_tokens: float = 0.0
    group: np.ndarray | None = None
    group_correlation: float = 0.0
    limit: float = np.inf

    @property
    def live(self) -> np.ndarray:
        """Indices of the unfinished sequences."""
        return np.flatnonzero(~self.finished)


@dataclass(frozen=True)
class Move:
    """Sequences (indices) that move from one actor to another, and why. Source -1 is a first placement."""

    sequences: np.ndarray
    source: int
    target: int
    reason: str


@dataclass(frozen=True)
class Moves:
    """The moves to make now.

    actor (n,): where each live sequence belongs (-1 for finished ones). moves: the changes, by source and target. open,
    release: leases to take and to give back. time_saved_s, cost_saved: expected savings against staying (0 for the
    first placement).
    """

    actor: np.ndarray
    moves: tuple[Move, ...]
    open: tuple[int, ...]
    release: tuple[int, ...]
    time_saved_s: float
    cost_saved: float
    reason: str


def decide_moves(live: LiveState, speed: Speed, settings: Settings) -> Moves:
    """Find the moves with the least expected time + cost_weight · cost. Returns no move if staying is as good.

    The target split is that of `best_split`, or an even one (as consolidation has it) where more than EVEN_SPLIT_SHARE
    of the forecasts are uninformative. With free moves, the target is taken every time. With costly moves, the search
    starts from the present placement. It tries emptying an actor into another one, moving the most critical sequences
    off a crowded actor, and the whole target. A change is made as long as its predicted saving exceeds its cost:
    migrate_s for the moved sequences, weighted by the probability that they end last, and start_s of lease and delay
    for every actor that is opened.

    Raises ValueError if no sequence is live.
    """
    index = live.live
    if not len(index):
        raise ValueError("there is nothing to move: every sequence has finished")
    view = remaining_lengths(live, settings)
    per_seq_s = speed.per_seq_s + speed.per_ctx_s * live.context_tokens
    now = live.actor[index]
    if view.uninformative_share > EVEN_SPLIT_SHARE:
        split = even_split(view, speed.base_s, per_seq_s, settings.cost_weight, settings.max_actors)
    else:
        split = best_split(
            view,
            speed.base_s,
            per_seq_s,
            settings.cost_weight,
            settings.max_actors,
            opened=len(live.opened),
            start_s=settings.start_s,
            lease_exponent=settings.lease_exponent,
        )
    target = relabel(split.group, now, live.opened, settings.max_actors)
    if (now < 0).any():
        return _describe(live, index, target, None, split.estimate, f"{split.groups} groups by criticality")
    search = MoveSearch(view, now, speed.base_s, per_seq_s, settings, live.opened)
    stay = search.estimate
    if settings.migrate_s == 0 and settings.start_s == 0:
        why = f"{len(index)} live on {split.groups} actors by criticality"
        return _describe(live, index, target, stay, split.estimate, why)
    reasons = search.run(target)
    return _describe(live, index, search.actor, stay, search.estimate, "; ".join(reasons) or "staying is as good")


def remaining_lengths(live: LiveState, settings: Settings) -> RemainingLengths:
    """Predict the remaining lengths of the live sequences with the calibrated forecast."""
    known = live.forecast
    ended = live.finished & (live.generated < live.limit)  # a response cut at the limit would have gone on
    if settings.learn:
        known = calibrate(known, live.generated, ended, uninformative_share=OUTLIER_SHARE)
    index = live.live
    uninformative_share = settings.uninformative_share
    if uninformative_share is None:
        seen = live.generated if settings.learn else np.zeros_like(live.generated)
        uninformative_share = estimate_uninformative_share(known, seen, ended)
    own = known
    if settings.learn and live.group is not None:
        own = condition_on_siblings(known, live.generated, ended, live.group, live.group_correlation)
    return predict_remaining(
        Forecast(own.mean_log[index], own.sd_log[index]), known, live.generated[index], uninformative_share, live.limit
    )


def cut_at_share(live: LiveState, begun: np.ndarray, tau: float) -> np.ndarray:
    """Apply the local cut of the RLHFless paper (arXiv 2602.22718). Returns the new actor (n,) of each sequence.

    An actor of whose begun (m,) sequences a share of at least `tau` has finished hands the rest to free slots elsewhere
    and is released. A slot is free where a begun sequence has ended. Receivers are taken from the highest-numbered
    actor down.
    """
    index = live.live
    held = np.bincount(live.actor[index], minlength=len(begun))
    new = live.actor.copy()
    for a in np.flatnonzero((held > 0) & (1 - held / np.maximum(begun, 1) >= tau)):
        free = np.where(held > 0, begun - held, 0)
        free[a] = 0
        if free.sum() >= held[a]:
            receivers = np.repeat(np.arange(len(begun))[::-1], free[::-1])[: held[a]]
            new[index[new[index] == a]] = receivers
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


def _describe(
    live: LiveState, index: np.ndarray, target: np.ndarray, stay: SplitEstimate | None, then: SplitEstimate, reason: str
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
        for who in np.split(changed, ends)
        if len(who)
    ]
    used = set(np.unique(target).tolist())
    saved_s, saved = (0.0, 0.0) if stay is None else (stay.time_s - then.time_s, stay.cost - then.cost)
    return Moves(
        actor, tuple(moves), tuple(sorted(used - set(live.opened))), tuple(sorted(set(live.opened) - used)), saved_s, saved, reason
    )
