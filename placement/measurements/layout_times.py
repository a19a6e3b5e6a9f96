"""Correct the seconds of calls by layout: what one layout of a call took tells of the others."""

from __future__ import annotations

from typing import Any

from placement.layouts import Layout
from placement.measurements.correction import Accuracy, Correction


class LayoutTimes:
    """Factors on the predicted seconds of calls, by call and by layout.

    A call has one factor that all its layouts share. A layout that was measured has its own, which stands beside the shared one as soon
    as it has records. So a new layout begins with what the call's others missed.
    """

    def __init__(self) -> None:
        self.shared: dict[str, Correction] = {}
        self.own: dict[str, dict[str, Correction]] = {}

    def correct(self, call: str, layout: Layout, predicted_s: float) -> float:
        """Return the corrected seconds of a call. predicted_s: by the roofline alone."""
        if call not in self.shared:
            return predicted_s
        shared = self.shared[call].factor(predicted_s)
        own = self.own[call].get(str(layout))
        return predicted_s * (shared if own is None else own.factor(predicted_s, unseen=shared))

    def observe(self, call: str, layout: Layout, predicted_s: float, seconds: float) -> None:
        """Record what a call took. predicted_s: by the roofline alone."""
        self.shared.setdefault(call, Correction()).observe(predicted_s, seconds)
        self.own.setdefault(call, {}).setdefault(str(layout), Correction()).observe(predicted_s, seconds)

    def accuracy(self, call: str) -> Accuracy | None:
        """Return how far off the newest predictions of a call were, or None before the first."""
        return self.shared[call].accuracy() if call in self.shared else None

    def state(self) -> dict[str, Any]:
        return {
            call: {"shared": shared.state(), "own": {name: one.state() for name, one in self.own[call].items()}}
            for call, shared in self.shared.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        for call, kept in state.items():
            self.shared[call], self.own[call] = Correction(), {name: Correction() for name in kept["own"]}
            self.shared[call].restore(kept["shared"])
            for name, one in kept["own"].items():
                self.own[call][name].restore(one)
