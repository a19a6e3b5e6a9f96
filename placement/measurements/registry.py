"""The registry of what a run measures besides decoding: fitted times, how far predictions made of them were off, and what is on trial."""

from __future__ import annotations

from typing import Any

from placement.measurements.correction import Correction
from placement.measurements.trial import Trial
from placement.speed.cost_terms import Term


class Measurements:
    """Fitted times by name, corrections of the predictions that are made of them and of the speed of decoding, and trials of measures.

    The seeds are of the right order of magnitude only. A vLLM engine process on CPU takes 15 s to start, and a parked one a tenth of a
    second.
    """

    def __init__(self) -> None:
        self.cold_start = Term(15.0)  # from lease to ready, no process yet
        self.warm_start = Term(0.1)  # from lease to ready, from a parked process
        self.transfer = Term(0.02, 1e-9)  # weights per byte, on the learner's node
        self.transfer_away = Term(0.03, 2e-9)  # weights per byte, to another node
        self.prefill = Term(0.005, 1e-5)  # per token
        self.passes = Term(0.1, 1e-5)  # per token: passes before the learner's update
        self.gradients = Term(0.1, 1e-5)  # per token: of complete groups, beside the rollout, on one slot of each rank
        self.score = Term(0.01, 1e-4)  # per sequence
        self.pause = Term(0.1)  # of a rollout that takes new weights, besides loading and prefill
        self.around = Term(0.03)  # of a rollout besides decoding: weights, calls, results
        self.outside = Term(0.03)  # of a step outside rollout, scoring and update
        self.rollout = Correction()  # seconds of a rollout
        self.cost = Correction()  # slot-seconds of its leases
        self.step = Correction()  # seconds of a step
        self.moves = Trial()  # of sequences between engines, to save time
        self.early_gradients = Trial()

    def settle(self) -> None:
        """Fit all pending records."""
        for one in vars(self).values():
            if isinstance(one, Term):
                one.settle()

    def state(self) -> dict[str, Any]:
        return {name: one.state() for name, one in vars(self).items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state. What is missing in it keeps its seed."""
        for name, one in vars(self).items():
            if name in state:
                one.restore(state[name])
