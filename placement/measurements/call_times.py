"""Fitted times of the calls of a step whose number of slots is chosen with that of the policy's update."""

from __future__ import annotations

from collections.abc import Callable

from placement.measurements.term import Term
from placement.plain_data import JsonObject


class CallTimes:
    """Seconds of calls by name, by ranks and the slots of each, and by tokens."""

    def __init__(self) -> None:
        self.terms: dict[str, dict[tuple[int, int], Term]] = {}

    def knows(self, call: str) -> bool:
        return call in self.terms

    def observe(self, call: str, ranks: int, slots: int, tokens: float, seconds: float) -> None:
        """Record a call. The first one includes the warm-up of a process, and counts no more once there is a second in this layout."""
        layouts = self.terms.setdefault(call, {})
        if (ranks, slots) not in layouts or layouts[ranks, slots].records == 1:
            layouts[ranks, slots] = Term(1.0)
        layouts[ranks, slots].observe(tokens, seconds)

    def predict(self, call: str, ranks: int, slots: int, tokens: float, update_s: Callable[[int], float]) -> float:
        """Return the seconds of a call. `update_s`: of the policy's update by slots, which stand for what was not measured of the call.

        Another number of ranks is taken to need the same slot-seconds.
        """
        if not (layouts := self.terms.get(call)):
            return update_s(slots)
        nearest = min(layouts, key=lambda layout: (abs(layout[0] - ranks), abs(layout[1] - slots)))
        return layouts[nearest].predict(tokens) * nearest[0] / ranks * update_s(slots) / update_s(nearest[1])

    def by_words(self) -> dict[str, Term]:
        """Return the times by what they are, in words."""
        return {
            f"{call}, ranks: {ranks}, slots a rank: {slots}": term
            for call, found in self.terms.items()
            for (ranks, slots), term in found.items()
        }

    def settle(self) -> None:
        """Fit the pending records."""
        for layouts in self.terms.values():
            for term in layouts.values():
                term.settle()

    def state(self) -> JsonObject:
        return {call: {f"{ranks}x{slots}": term.state() for (ranks, slots), term in found.items()} for call, found in self.terms.items()}

    def restore(self, state: JsonObject) -> None:
        """Restore a state. Times of checkpoints before 2026-11-29 do not name their ranks, and are left out."""
        for call, found in state.items():
            for key, term in found.items():
                if "x" in key:
                    ranks, slots = map(int, key.split("x"))
                    self.terms.setdefault(call, {})[ranks, slots] = Term(1.0)
                    self.terms[call][ranks, slots].restore(term)
