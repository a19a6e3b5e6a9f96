"""Choose how many ranks an update gets: by measured times, and by what a change of ranks costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from placement.scaling.learner_size import MIN_TRIALS, LearnerSize
from placement.scaling.resize_policy import MAX_COST_SHARE, MIN_SAVING, Decision, Hold, ResizeHistory, kind_of_change, pays_back


class LearnerRanks:
    """Times of updates by number of ranks, and of slots a rank (`LearnerSize`).

    The worth of an update is that of `LearnerSize`: (slots + value of a second) · seconds. A number of ranks that no update had yet is
    taken to need the least slot-seconds of the present one, which is the best that it can do. So a trial must pay for the way there and
    back.
    """

    def __init__(self, counts: Sequence[int], most_slots: int, *, fixed: bool = False) -> None:
        """Set the candidates, of which the first is the present one. `most_slots`: of a rank. `fixed`: a rank always has so many.

        Raises ValueError without candidates.
        """
        if not counts:
            raise ValueError("an update needs at least one number of ranks")
        self.sizes = {count: LearnerSize(most_slots, fixed=fixed) for count in counts}
        self.current, self.history = counts[0], ResizeHistory()

    @property
    def size(self) -> LearnerSize:
        """Slots of each of the present ranks."""
        return self.sizes[self.current]

    def worth(self, ranks: int, tokens: float, value_per_s: float, room: int) -> tuple[float, float, int] | None:
        """Return (worth, seconds, slots) of an update of so many tokens, at best. None if `room` slots are too few for the ranks."""
        size = self.sizes[ranks]
        counts = [count for count in size.counts if ranks * count <= room]
        measured = [count for count in counts if size.tried[count]]
        if measured:
            found = ((size.predict(count, tokens), ranks * count) for count in measured)
        else:
            tried = [count for count in self.size.counts if self.size.tried[count]]
            least = min((self.current * count * self.size.predict(count, tokens) for count in tried), default=None)
            found = ((least / (ranks * count), ranks * count) for count in counts if least is not None)
        return min((((slots + value_per_s) * seconds, seconds, slots) for seconds, slots in found), default=None)

    def decide(
        self, tokens: float, *, step: int, steps_left: int, room: int, value_per_s: float, change_s: float, gamma: float = MAX_COST_SHARE
    ) -> Decision:
        """Decide the number of ranks from the next update on. The decision's `actors` are ranks.

        Args:
            tokens: of an update.
            step, steps_left: number of this step, and of steps after it.
            room: slots that the learner can have.
            value_per_s: worth of a second of the step.
            change_s: seconds that a change of ranks takes.
            gamma: share of its savings that a change may cost.
        """
        now = self.current
        if len(self.sizes) == 1:
            return Hold(now, f"{_ranks(now)}, as the recipe says")
        possible = [count for count in self.size.counts if now * count <= room]
        if steps_left < 1 or any(self.size.tried[count] < MIN_TRIALS for count in possible):
            return Hold(now, f"{_ranks(now)}: their updates are not measured yet" if steps_left else "the last step")
        known = {ranks: found for ranks in self.sizes if (found := self.worth(ranks, tokens, value_per_s, room)) is not None}
        if now not in known:
            return Hold(now, f"{_ranks(now)}: there are slots for no other number")
        best = min(known, key=lambda ranks: (known[ranks][0], ranks != now, ranks))
        self.history = self.history.record(step, best)
        (before, now_s, _), (after, best_s, slots) = known[now], known[best]
        figures = f"{_ranks(best)}: {best_s:.3g} s" + (f" ({now}: {now_s:.3g} s)" if best != now else "")
        if best == now:
            return Hold(now, figures, now_s)
        is_trial = not self.sizes[best].is_measured
        once = (1 + is_trial) * change_s * (max(slots, now) + value_per_s)
        lasts = float(steps_left) if is_trial else min(self.history.horizon(step), steps_left)
        pays, why = pays_back(before - after, before, once, lasts, gamma, MIN_SAVING)
        if not pays:
            return Hold(now, f"{figures} {why}", now_s)
        return kind_of_change(best, now)(best, f"{figures}{', if they scale' if is_trial else ''} {why}", best_s, slots * best_s)

    def fewer(self, room: int) -> int | None:
        """Return the most ranks below the present number for which there are slots, or None."""
        return max((ranks for ranks in self.sizes if ranks < self.current and ranks <= room), default=None)

    def settle(self) -> None:
        """Fit the pending records."""
        for size in self.sizes.values():
            size.settle()

    def state(self) -> dict[str, Any]:
        return {str(ranks): size.state() for ranks, size in self.sizes.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for key, of_ranks in state.items():
            if int(key) in self.sizes:  # the recipe may have another limit now
                self.sizes[int(key)].restore(of_ranks)


def _ranks(count: int) -> str:
    return f"{count} rank" + "s" * (count != 1)
