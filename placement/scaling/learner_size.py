"""Choose how many slots an update gets, by the time that more of them save and the cost that they add."""

from __future__ import annotations

from typing import Any

from placement.scaling.resize_policy import Decision, Grow, Hold, Shrink
from placement.speed.cost_terms import Term

MIN_TRIALS = 2  # trials of each count before counts are compared: a process's first update includes its warm-up


class LearnerSize:
    """Fits update times by number of slots, and chooses among the numbers.

    Candidates are the powers of two up to `most`, and `most`. The gain of a further slot is not assumed: on a machine
    whose cores share their memory it may be nothing. So each count is tried before it is judged.
    """

    def __init__(self, most: int) -> None:
        """Set the candidates. Raises ValueError for fewer than one slot."""
        if most < 1:
            raise ValueError(f"an update needs at least one slot, got {most}")
        self.counts = sorted({most, *(2**k for k in range(most.bit_length()) if 2**k <= most)})
        self.terms = {count: Term(1.0) for count in self.counts}
        self.tried = dict.fromkeys(self.counts, 0)

    def decide(self, current: int, tokens: float, *, value_per_s: float) -> Decision:
        """Choose the slots for an update of this many tokens: least slots · seconds + value_per_s · seconds.

        Takes fewer slots on a tie. value_per_s: worth of a second of the step (`resize_policy.time_value`).
        """
        for count in reversed(self.counts):
            if self.tried[count] < MIN_TRIALS:
                return _to(count, current, f"trying {count}: not measured yet", self.terms[count].predict(tokens))
        seconds = {count: self.terms[count].predict(tokens) for count in self.counts}
        best = min(self.counts, key=lambda count: ((count + value_per_s) * seconds[count], count))
        others = ", ".join(f"{count}: {seconds[count]:.3g} s" for count in self.counts if count != best)
        reason = f"{best} slots: {seconds[best]:.3g} s for {best * seconds[best]:.3g} slot-s" + (f" ({others})" if others else "")
        return _to(best, current, reason, seconds[best])

    def predict(self, slots: int, tokens: float) -> float:
        """Return the seconds of an update, from the nearest count that was tried."""
        tried = [count for count in self.counts if self.tried[count]] or self.counts
        return self.terms[min(tried, key=lambda count: abs(count - slots))].predict(tokens)

    def observe(self, slots: int, tokens: float, seconds: float) -> None:
        """Record an update on `slots` slots. Counts that are not candidates (fewer were available) are ignored."""
        if slots in self.terms:
            self.terms[slots].observe(tokens, seconds)
            self.tried[slots] += 1

    def settle(self) -> None:
        """Fit the pending records."""
        for term in self.terms.values():
            term.settle()

    def state(self) -> dict[str, Any]:
        return {str(count): [self.tried[count], self.terms[count].state()] for count in self.counts}

    def restore(self, state: dict[str, Any]) -> None:
        for key, (tried, term) in state.items():
            if int(key) in self.terms:  # the recipe may have another limit now
                self.tried[int(key)] = tried
                self.terms[int(key)].restore(term)


def _to(count: int, current: int, reason: str, seconds: float) -> Decision:
    kind = Hold if count == current else Grow if count > current else Shrink
    return kind(count, reason, seconds, count * seconds)
