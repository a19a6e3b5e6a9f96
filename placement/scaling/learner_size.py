"""Choose how many slots an update gets, by the time that more of them save and the cost that they add."""

from __future__ import annotations

from collections.abc import Mapping

from placement.measurements.term import Term
from placement.plain_data import JsonObject
from placement.scaling.resize_policy import Decision, kind_of_change

MIN_TRIALS = 2  # trials of each count before counts are compared
TRIED_AGAIN = 0.02  # share of the updates' time and cost that trials of counts that seem worse may add
INTERVAL = 2  # updates between two trials of a count that seems worse, for each trial so far


class LearnerSize:
    """Fits update times by number of slots, and chooses among the numbers.

    Candidates are the powers of two up to `most`, and `most`. The gain of a further slot is not assumed: on a machine
    whose cores share their memory it may be nothing. So each count is tried before it is judged. Its first time includes the
    warm-up of a process, and counts no more once there is a second. A run's first updates may all be slow, so a count that
    seems worse is tried again from time to time: the more it would add, the later.
    """

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        """Set the candidates: with `fixed` only `most`. Raises ValueError for fewer than one slot."""
        if most < 1:
            raise ValueError(f"an update needs at least one slot, got {most}")
        fewer = () if fixed else (2**k for k in range(most.bit_length()) if 2**k <= most)
        self.counts = sorted({most, *fewer})
        self.terms = {count: Term(1.0) for count in self.counts}
        self.tried = dict.fromkeys(self.counts, 0)
        self.updates_since = dict.fromkeys(self.counts, 0)  # its last trial

    def decide(self, current: int, tokens: float, *, value_per_s: float, retries: bool = True) -> Decision:
        """Choose the slots for an update of this many tokens: least slots · seconds + value_per_s · seconds.

        Takes fewer slots on a tie. value_per_s: worth of a second of the step (`resize_policy.time_value`). retries: whether a count
        that seems worse may be tried again now.
        """
        if (trial := self.trial(current, tokens)) is not None:
            return trial
        seconds = {count: self.terms[count].predict(tokens) for count in self.counts}
        worth = {count: (count + value_per_s) * seconds[count] for count in self.counts}
        best = min(self.counts, key=lambda count: (worth[count], count))
        if retries and (retrial := self.retrial(best, current, tokens, worth)) is not None:
            return retrial
        others = ", ".join(f"{count}: {seconds[count]:.3g} s" for count in self.counts if count != best)
        reason = f"{best} slots: {seconds[best]:.3g} s for {best * seconds[best]:.3g} slot-s" + (f" ({others})" if others else "")
        return decision_for(best, current, reason, seconds[best])

    def trial(self, current: int, tokens: float) -> Decision | None:
        """Return the next count to try, or None if all of them are measured."""
        for count in reversed(self.counts):
            if self.tried[count] < MIN_TRIALS:
                return decision_for(count, current, f"trying {count}: not measured yet", self.terms[count].predict(tokens))
        return None

    def retrial(self, best: int, current: int, tokens: float, costs: Mapping[int, float]) -> Decision | None:
        """Return the decision to try a count again that seems worse than `best`, or None if none is due. `costs`: by possible count."""
        for count, cost in costs.items():
            since, added = self.updates_since[count], cost - costs[best]
            if count != best and since >= INTERVAL * self.tried[count] and TRIED_AGAIN * since * costs[best] >= added:
                seconds, best_s = self.predict(count, tokens), self.predict(best, tokens)
                reason = f"trying {count} again: {seconds:.3g} s {since} updates ago, {best}: {best_s:.3g} s"
                return decision_for(count, current, reason, seconds)
        return None

    @property
    def is_measured(self) -> bool:
        """Whether any update was measured."""
        return any(self.tried.values())

    def predict(self, slots: int, tokens: float) -> float:
        """Return the seconds of an update, from the nearest count that was tried."""
        tried = [count for count in self.counts if self.tried[count]] or self.counts
        return self.terms[min(tried, key=lambda count: abs(count - slots))].predict(tokens)

    def observe(self, slots: int, tokens: float, seconds: float) -> None:
        """Record an update on `slots` slots. Counts that are not candidates (fewer were available) are ignored."""
        if slots in self.terms:
            if self.tried[slots] == 1:
                self.terms[slots] = Term(1.0)
            self.terms[slots].observe(tokens, seconds)
            self.tried[slots] += 1
        self.updates_since = {count: 0 if count == slots else since + 1 for count, since in self.updates_since.items()}

    def settle(self) -> None:
        """Fit the pending records."""
        for term in self.terms.values():
            term.settle()

    def state(self) -> JsonObject:
        return {str(count): [self.tried[count], self.terms[count].state(), self.updates_since[count]] for count in self.counts}

    def restore(self, state: JsonObject) -> None:
        for key, (tried, term, *since) in state.items():
            if int(key) in self.terms:  # the recipe may have another limit now
                self.tried[int(key)] = tried
                self.terms[int(key)].restore(term)
                self.updates_since[int(key)] = since[0] if since else 0  # of runs before 2026-11-26 not known


def decision_for(count: int, current: int, reason: str, seconds: float) -> Decision:
    """Return the decision to give each rank `count` slots instead of `current`."""
    return kind_of_change(count, current)(count, reason, seconds, count * seconds)
