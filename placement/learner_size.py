"""How many slots an update is given: what more of them bring, against what they cost."""

from __future__ import annotations

from typing import Any

from placement.policy import Decision, Grow, Hold, Shrink
from placement.terms import Term

TRIES = 2  # of every count before counts are compared: the first update of a process also pays for its warm-up


class LearnerSize:
    """Fitted update times by number of slots, and the choice among them.

    Counts are the powers of two up to `most`, and `most`. What a further slot brings is not assumed: on a machine whose
    cores share their memory it may bring nothing, so each count is tried before it is judged.
    """

    def __init__(self, most: int) -> None:
        """Raises ValueError for fewer than one slot."""
        if most < 1:
            raise ValueError(f"an update needs at least one slot, got {most}")
        self.counts = sorted({most, *(2**k for k in range(most.bit_length()) if 2**k <= most)})
        self.terms = {count: Term(1.0) for count in self.counts}
        self.tried = dict.fromkeys(self.counts, 0)

    def decide(self, current: int, tokens: float, *, second: float, price: float = 1.0) -> Decision:
        """Slots for an update of so many tokens: least price · slots · seconds + second · seconds, fewer on a tie.

        `second`: what a second of the step is worth (`policy.time_value`).
        """
        for count in reversed(self.counts):
            if self.tried[count] < TRIES:
                return _to(count, current, f"trying {count}: not measured yet", self.terms[count].predict(tokens), price)
        seconds = {count: self.terms[count].predict(tokens) for count in self.counts}
        best = min(self.counts, key=lambda count: ((price * count + second) * seconds[count], count))
        others = ", ".join(f"{count}: {seconds[count]:.3g} s" for count in self.counts if count != best)
        reason = f"{best} slots: {seconds[best]:.3g} s for {best * seconds[best]:.3g} slot-s" + (f" ({others})" if others else "")
        return _to(best, current, reason, seconds[best], price)

    def predict(self, slots: int, tokens: float) -> float:
        """Seconds of an update; those of the nearest count that was tried where this one was not."""
        tried = [count for count in self.counts if self.tried[count]] or self.counts
        return self.terms[min(tried, key=lambda count: abs(count - slots))].predict(tokens)

    def observe(self, slots: int, tokens: float, seconds: float) -> None:
        """An update on `slots` slots. Counts that are not among the choices (fewer could be had) teach nothing."""
        if slots in self.terms:
            self.terms[slots].observe(tokens, seconds)
            self.tried[slots] += 1

    def settle(self) -> None:
        """Fit what was observed."""
        for term in self.terms.values():
            term.settle()

    def state(self) -> dict[str, Any]:
        return {str(count): [self.tried[count], self.terms[count].state()] for count in self.counts}

    def restore(self, state: dict[str, Any]) -> None:
        for key, (tried, term) in state.items():
            if int(key) in self.terms:  # the recipe may have another limit now
                self.tried[int(key)] = tried
                self.terms[int(key)].restore(term)


def _to(count: int, current: int, reason: str, seconds: float, price: float) -> Decision:
    kind = Hold if count == current else Grow if count > current else Shrink
    return kind(count, reason, seconds, price * count * seconds)
