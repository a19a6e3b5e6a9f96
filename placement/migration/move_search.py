"""Local search over changes of the present placement, weighing what each saves against what it costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.forecast.remaining_length import RemainingLengths
from placement.migration.load_split import SQUARE_ROOT, SplitEstimate, estimate_split, estimate_splits

MIN_GAIN = 0.002  # share of the score that a change must save beyond its cost
CANDIDATE_ACTORS = 5  # actors tried as sources and as targets of single changes
MAX_CHANGES = 4  # single changes in one decision
MOVE_COUNTS = (1, 4, 16, 64, 256)  # how many of a crowded actor's most critical sequences are tried elsewhere


@dataclass(frozen=True)
class Settings:
    """Settings of `decide_moves`.

    cost_weight: weight of cost in time + cost_weight · cost (seconds per actor-second). max_actors: actors that may be
    leased. migrate_s: seconds for which a moved sequence does not decode. start_s: seconds from lease to first token.
    uninformative_share: see `predict_remaining`; None estimates it from the forecast (`estimate_uninformative_share`).
    learn: correct the forecast by what this rollout shows.
    """

    cost_weight: float
    max_actors: int
    migrate_s: float = 0.0
    start_s: float = 0.0
    uninformative_share: float | None = None
    learn: bool = True

    @property
    def lease_exponent(self) -> float:
        """Exponent for `estimate_splits`.

        Free moves place every sequence again at every decision. Where a move costs something, a merge comes only when it
        pays. Counting on more merging made each decision postpone it to the next: on log-normal lengths, with moves of
        0.1 s and starts of 0.3 s, time + cost_weight · cost was 3 % higher.
        """
        return 1.0 if self.migrate_s == self.start_s == 0 else SQUARE_ROOT


@dataclass(frozen=True)
class Change:
    """A change of placement: the sequences that move (positions among the live ones) and the actor that takes them."""

    sequences: np.ndarray
    target_actor: int
    reason: str


class MoveSearch:
    """Searches changes of the present placement, each taken only if it saves more than it costs.

    A placement is described by one row per actor (its expected survivors). So the cost of trying a change does not grow
    with the number of sequences.
    """

    def __init__(
        self, view: RemainingLengths, actor: np.ndarray, base_s: float, per_seq_s: float, settings: Settings, opened: tuple[int, ...]
    ) -> None:
        self.view, self.settings, self.base_s, self.per_seq_s = view, settings, base_s, per_seq_s
        self.actor, self.opened = actor.copy(), set(opened)
        self.rows = self.survivors_by_actor(self.actor)
        self.estimate = self.estimate_rows(self.rows)

    def survivors_by_actor(self, actor: np.ndarray) -> dict[int, np.ndarray]:
        """Return the expected survivors (G+1,) of each actor in use, now and along the grid."""
        order = np.argsort(actor, kind="stable")
        first = np.flatnonzero(np.r_[True, np.diff(actor[order]) > 0])
        alive = np.add.reduceat(self.view.alive[order], first, axis=0)
        count = np.diff(np.r_[first, len(actor)])
        return {int(actor[order[k]]): np.r_[float(count[at]), alive[at]] for at, k in enumerate(first)}

    def estimate_rows(self, rows: dict[int, np.ndarray]) -> SplitEstimate:
        every = np.stack(list(rows.values()))
        return estimate_split(every, self.view.tokens, self.base_s, self.per_seq_s, self.settings.cost_weight, self.settings.lease_exponent)

    def _delay_probability(self, delay_s: float) -> np.ndarray:
        """Return (n,) the expected delay of the end per second of pause, for a pause of `delay_s` of each sequence.

        This is ∫ P(last | late by u) du / delay_s by the trapezoid rule. If several sequences are sure to end at the
        same time, whichever pauses becomes the last.
        """
        token_s = self.base_s + self.per_seq_s * len(self.actor) / max(1, len(set(self.actor.tolist())))
        shares = (self.view.critical + self.view.last(delay_s / token_s)) / 2
        return np.maximum(shares, 0.5 / len(self.actor))  # moving an uncritical sequence must not be free either

    def change_cost(self, sequences: np.ndarray, is_new: np.ndarray, new_actors: int) -> float:
        """Return the cost of a change in units of the score.

        sequences: those that move. is_new (bool): which of them go to newly opened actors. new_actors: number of these.
        """
        settings = self.settings
        start_s = max(settings.start_s, settings.migrate_s)
        wait_s = settings.migrate_s * min(1.0, float(self.pause_probability[sequences[~is_new]].sum()))
        late_s = start_s * min(1.0, float(self.start_probability[sequences[is_new]].sum()))
        return max(wait_s, late_s) + settings.cost_weight * new_actors * start_s

    def run(self, target: np.ndarray) -> list[str]:
        """Apply the best change while one pays, and return the reasons. The whole split `target` is tried first."""
        migrate_s, start_s = self.settings.migrate_s, self.settings.start_s
        self.pause_probability = self._delay_probability(migrate_s)
        self.start_probability = self._delay_probability(start_s) if start_s > migrate_s else self.pause_probability
        moved = np.flatnonzero(target != self.actor)
        opening = set(np.unique(target).tolist()) - self.opened
        change_cost = self.change_cost(moved, np.isin(target[moved], list(opening)), len(opening))
        estimate = self.estimate_rows(self.survivors_by_actor(target))
        reasons: list[str] = []
        found = self.best_change()
        whole = estimate.score + change_cost
        if whole < min(self.max_score(), found[0] if found else np.inf):
            reasons.append(f"new split by criticality: saves {self.estimate.score - estimate.score:.3g}, costs {change_cost:.3g}")
            self.actor, self.rows, self.estimate = target, self.survivors_by_actor(target), estimate
            return reasons
        while found and found[0] < self.max_score() and len(reasons) < MAX_CHANGES:
            score, estimate, rows, option = found
            saved = self.estimate.score - estimate.score
            reasons.append(f"{option.reason}: saves {saved:.3g}, costs {score - estimate.score:.3g}")
            self.actor[option.sequences] = option.target_actor
            self.opened.add(option.target_actor)
            self.rows, self.estimate = rows, estimate
            found = self.best_change()
        return reasons

    def max_score(self) -> float:
        return self.estimate.score * (1 - MIN_GAIN)

    def best_change(self) -> tuple[float, SplitEstimate, dict[int, np.ndarray], Change] | None:
        """Return the change with the least score and cost together: (that sum, its estimate, its rows, the change)."""
        found = self.candidate_changes()
        if not found:
            return None
        names = [*self.rows, None]  # the last entry stands for a newly opened actor
        place = {name: at for at, name in enumerate(names)}
        rows = np.stack([*self.rows.values(), np.zeros(len(self.view.tokens) + 1)])
        tried = np.repeat(rows[None], len(found), axis=0)
        every = np.arange(len(found))
        moved_survivors = np.stack([taken for _, taken in found])
        tried[every, [place[int(self.actor[option.sequences[0]])] for option, _ in found]] -= moved_survivors
        tried[every, [place.get(option.target_actor, len(names) - 1) for option, _ in found]] += moved_survivors
        used = tried[:, :, 0] >= 0.5
        count = used.sum(1)
        first = np.cumsum(count) - count
        time_s, cost = estimate_splits(tried[used], first, self.view.tokens, self.base_s, self.per_seq_s, self.settings.lease_exponent)
        score = time_s + self.settings.cost_weight * cost
        change_cost = np.empty(len(found))
        for k, (option, _) in enumerate(found):
            is_new = option.target_actor not in self.opened
            change_cost[k] = self.change_cost(option.sequences, np.full(len(option.sequences), is_new), int(is_new))
        k = int(np.argmin(score + change_cost))
        option = found[k][0]
        left = {option.target_actor if name is None else name: tried[k, at] for at, name in enumerate(names) if used[k, at]}
        return float(score[k] + change_cost[k]), SplitEstimate(float(time_s[k]), float(cost[k]), float(score[k])), left, option

    def candidate_changes(self) -> list[tuple[Change, np.ndarray]]:
        """List changes to try, each with the survivors (G+1,) that move.

        These are: a lightly loaded actor emptied into another one, and the most critical sequences of a crowded actor
        moved to a lightly loaded or a spare one.
        """
        by_load = sorted(self.rows, key=lambda a: (self.rows[a][0], a))
        held = {a: np.flatnonzero(self.actor == a) for a in {*by_load[:CANDIDATE_ACTORS], *by_load[-CANDIDATE_ACTORS:]}}
        found = []
        for a in by_load[:CANDIDATE_ACTORS]:
            for b in by_load[: CANDIDATE_ACTORS + 1]:
                if a != b:
                    found.append((Change(held[a], b, f"actor {a} emptied into {b}"), self.rows[a]))
        spare = [a for a in range(self.settings.max_actors) if a not in self.rows]
        spare.sort(key=lambda a: (a not in self.opened, a))
        for source in by_load[-CANDIDATE_ACTORS:]:
            mine = held[source][np.argsort(-self.view.critical[held[source]], kind="stable")][: MOVE_COUNTS[-1]]
            survivors = np.cumsum(self.view.alive[mine], axis=0)
            for count in MOVE_COUNTS:
                if count >= len(held[source]):
                    break
                moved_survivors = np.r_[float(count), survivors[count - 1]]
                for target_actor in [*by_load[:2], *spare[:1]]:
                    if target_actor != source:
                        why = f"the {count} most critical of actor {source} to {target_actor}"
                        found.append((Change(mine[:count], target_actor, why), moved_survivors))
        return found
