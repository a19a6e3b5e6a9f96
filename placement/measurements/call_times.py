"""Fitted times of the calls of a step whose number of slots is chosen with that of the policy's update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from placement.measurements.term import Term


class CallTimes:
    """Seconds of calls by name, by the slots of each rank, and by tokens."""

    def __init__(self) -> None:
        self.terms: dict[str, dict[int, Term]] = {}

    def knows(self, call: str) -> bool:
        return call in self.terms

    def observe(self, call: str, slots: int, tokens: float, seconds: float) -> None:
        """Record a call. The first one includes the warm-up of a process, and counts no more once there is a second on as many slots."""
        by_slots = self.terms.setdefault(call, {})
        if slots not in by_slots or by_slots[slots].records == 1:
            by_slots[slots] = Term(1.0)
        by_slots[slots].observe(tokens, seconds)

    def predict(self, call: str, slots: int, tokens: float, update_s: Callable[[int], float]) -> float:
        """Return the seconds of a call. `update_s`: of the policy's update by slots, which stand for what was not measured of the call."""
        if not (by_slots := self.terms.get(call)):
            return update_s(slots)
        nearest = min(by_slots, key=lambda count: abs(count - slots))
        return by_slots[nearest].predict(tokens) * update_s(slots) / update_s(nearest)

    def by_words(self) -> dict[str, Term]:
        """Return the times by what they are, in words."""
        return {f"{call}, slots a rank: {slots}": term for call, by_slots in self.terms.items() for slots, term in by_slots.items()}

    def settle(self) -> None:
        """Fit the pending records."""
        for by_slots in self.terms.values():
            for term in by_slots.values():
                term.settle()

    def state(self) -> dict[str, Any]:
        return {call: {str(slots): term.state() for slots, term in by_slots.items()} for call, by_slots in self.terms.items()}

    def restore(self, state: dict[str, Any]) -> None:
        for call, by_slots in state.items():
            self.terms[call] = {int(slots): Term(1.0) for slots in by_slots}
            for slots, term in by_slots.items():
                self.terms[call][int(slots)].restore(term)
