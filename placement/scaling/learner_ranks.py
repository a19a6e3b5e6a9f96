"""Choose how many ranks an update gets: by what a whole step takes on each number, and by what a change of ranks costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.plain_data import JsonObject
from placement.planning.objective import Objective
from placement.scaling.learner_size import MIN_TRIALS, LearnerSize
from placement.scaling.resize_policy import MAX_COST_SHARE, MIN_SAVING, Decision, Hold, ResizeHistory, kind_of_change, pays_back, time_value


@dataclass(frozen=True)
class RestOfStep:
    """A step besides the calls of its learn phase: seconds, and slot-seconds of all holders.

    beside: slots that others hold during these calls, parked processes by their price. Shorter calls free them sooner.
    """

    seconds: float = 0.0
    slot_seconds: float = 0.0
    beside: float = 0.0


@dataclass(frozen=True)
class RankStep:
    """A step on a number of ranks: its seconds, its slot-seconds, and seconds and slots of its update."""

    time_s: float
    cost: float
    update_s: float
    slots: int


class LearnerRanks:
    """Times of updates by number of ranks, and of slots a rank (`LearnerSize`).

    Numbers of ranks are compared by the whole step. One that no update had yet is taken to need the least slot-seconds of the present one,
    which is the best that it can do. So a trial must pay for the way there and back.
    """

    def __init__(self, counts: Sequence[int], most_slots: int, *, fixed: bool = False) -> None:
        """Set the candidates, of which the first is the present one. `most_slots`: of a rank. `fixed`: a rank always has so many.

        Raises ValueError without candidates.
        """
        if not counts:
            raise ValueError("an update needs at least one number of ranks")
        self.sizes = {count: LearnerSize(most_slots, fixed=fixed) for count in counts}
        self.current, self.history = counts[0], ResizeHistory()
        self.others: dict[tuple[int, int], tuple[float, float]] = {}
        """Seconds and slot-seconds that other calls of the phase add to an update, by its ranks and slots. Empty if there are none."""

    @property
    def size(self) -> LearnerSize:
        """Slots of each of the present ranks."""
        return self.sizes[self.current]

    def updates(self, ranks: int, tokens: float, room: int) -> list[tuple[float, int]]:
        """Return seconds and slots of an update of so many tokens. Empty if `room` slots are too few for the ranks."""
        size = self.sizes[ranks]
        counts = [count for count in size.counts if ranks * count <= room]
        measured = [count for count in counts if size.tried[count]]
        if measured:
            return [(size.predict(count, tokens), ranks * count) for count in measured]
        tried = [count for count in self.size.counts if self.size.tried[count]]
        least = min((self.current * count * self.size.predict(count, tokens) for count in tried), default=None)
        return [(least / (ranks * count), ranks * count) for count in counts if least is not None]

    def steps(self, ranks: int, tokens: float, room: int, rest: RestOfStep) -> list[RankStep]:
        """Return the steps with an update of so many tokens, and with the calls that it leaves or that run beside it, by its slots."""
        found = []
        for update_s, slots in self.updates(ranks, tokens, room):
            if self.others and (ranks, slots) not in self.others:
                continue  # there is no room for the other calls
            more_s, more_slot_s = self.others.get((ranks, slots), (0.0, 0.0))
            calls_s, cost = update_s + more_s, slots * update_s + more_slot_s + rest.slot_seconds
            found.append(RankStep(rest.seconds + calls_s, cost + rest.beside * calls_s, update_s, slots))
        return found

    def decide(
        self,
        tokens: float,
        *,
        step: int,
        steps_left: int,
        room: int,
        rest: RestOfStep,
        objective: Objective,
        value_per_s: float,
        change_s: float,
        gamma: float = MAX_COST_SHARE,
        unit: str = "slot-s",
    ) -> Decision:
        """Decide the number of ranks from the next update on. The decision's `actors` are ranks.

        Args:
            tokens: of an update.
            step, steps_left: number of this step, and of steps after it.
            room: slots that the learner can have.
            rest: what a step has besides the update.
            objective: what steps are compared by. Its deadline or budget is one of the rollout alone.
            value_per_s: worth of a second for such an objective.
            change_s: seconds that a change of ranks takes.
            gamma: share of its savings that a change may cost.
            unit: of costs, for the reason.
        """
        now = self.current
        if len(self.sizes) == 1:
            return Hold(now, f"{_ranks(now)}, as the recipe says")
        possible = [count for count in self.size.counts if now * count <= room]
        if steps_left < 1 or any(self.size.tried[count] < MIN_TRIALS for count in possible):
            return Hold(now, f"{_ranks(now)}: their updates are not measured yet" if steps_left else "the last step")
        all_steps = {ranks: found for ranks in self.sizes if (found := self.steps(ranks, tokens, room, rest))}
        if now not in all_steps:
            return Hold(now, f"{_ranks(now)}: there are slots for no other number")
        if objective.deadline_s is None and objective.budget is None:
            value_per_s = time_value(objective, [one for found in all_steps.values() for one in found])

        def worth(one: RankStep) -> float:
            return one.cost + value_per_s * one.time_s

        steps = {ranks: min(found, key=worth) for ranks, found in all_steps.items()}
        best = min(steps, key=lambda ranks: (worth(steps[ranks]), ranks != now, ranks))
        self.history = self.history.record(step, best)
        before, after = steps[now], steps[best]
        figures = f"{_ranks(best)}: step of {after.time_s:.3g} s for {after.cost:.3g} {unit}"
        if best == now:
            return Hold(now, figures, before.update_s)
        figures += f" ({now}: {before.time_s:.3g} s for {before.cost:.3g})"
        is_trial = not self.sizes[best].is_measured
        once = (1 + is_trial) * change_s * (max(after.slots, now) + rest.beside + value_per_s)
        lasts = float(steps_left) if is_trial else min(self.history.horizon(step), steps_left)
        pays, why = pays_back(worth(before) - worth(after), worth(before), once, lasts, gamma, MIN_SAVING, unit)
        if not pays:
            return Hold(now, f"{figures} {why}", before.update_s)
        reason = f"{figures}{', if they scale' if is_trial else ''} {why}"
        return kind_of_change(best, now)(best, reason, after.update_s, after.slots * after.update_s)

    def fewer(self, room: int) -> int | None:
        """Return the most ranks below the present number for which there are slots, or None."""
        return max((ranks for ranks in self.sizes if ranks < self.current and ranks <= room), default=None)

    def settle(self) -> None:
        """Fit the pending records."""
        for size in self.sizes.values():
            size.settle()

    def state(self) -> JsonObject:
        return {str(ranks): size.state() for ranks, size in self.sizes.items()}

    def restore(self, state: JsonObject) -> None:
        for key, of_ranks in state.items():
            if int(key) in self.sizes:  # the recipe may have another limit now
                self.sizes[int(key)].restore(of_ranks)


def _ranks(count: int) -> str:
    return f"{count} rank" + "s" * (count != 1)
