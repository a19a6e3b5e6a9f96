"""The registry of what a run measures besides decoding: fitted times, how far predictions made of them were off, and what is on trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from placement.measurements.call_times import CallTimes
from placement.measurements.correction import FAR, FAR_IN_A_ROW, Accuracy, Correction, FarOff
from placement.measurements.pool_times import PoolTimes
from placement.measurements.term import Term
from placement.measurements.trial import Trial
from placement.plain_data import JsonObject

FEW = 5  # predictions of a quantity before its accuracy is shown
# Quantities in words. Their units are seconds, except for the cost.
WORDS = {
    "rollout": "rollout time",
    "cost": "rollout cost",
    "step": "step time",
    "cold_start": "start of an engine",
    "warm_start": "wake of parked engines",
    "transfer": "load of weights",
    "transfer_away": "load of weights on another node",
    "prefill": "prefill",
    "passes": "passes before the update",
    "score": "scoring",
    "pause": "pause for new weights",
    "around": "rollout besides decoding",
    "outside": "step besides its phases",
}
_MANY = f"the last {FAR_IN_A_ROW} forecasts were off by more than {FAR:g} times their 90 % interval"


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
        self.reshard = Term(1.0)  # of a change of the learner's ranks
        self.score = Term(0.01, 1e-4)  # per sequence
        self.pause = Term(0.1)  # of a rollout that takes new weights, besides loading and prefill
        self.around = Term(0.03)  # of a rollout besides decoding: weights, calls, results
        self.outside = Term(0.03)  # of a step outside rollout, scoring and update
        self.rollout = Correction()  # seconds of a rollout
        self.cost = Correction()  # slot-seconds of its leases
        self.step = Correction()  # seconds of a step
        self.moves = Trial()  # of sequences between engines, to save time
        self.early_wake = Trial()  # of engines, before the update ends
        self.calls = CallTimes()  # of a step's learn phase, besides the policy's update
        self.pools = PoolTimes()  # starts and preemptions in each pool of nodes
        self.side_by_side = Trial(few=2)  # calls of the learn phase that run at the same time
        self.lengths = FarOff()  # forecasts of single responses
        self.far_lengths = 0  # times that many of them in a row were far off, since the user was told
        self._others: list[Callable[[], Mapping[str, Term]]] = [self.calls.by_words, self.pools.by_words]

    def include(self, terms: Callable[[], Mapping[str, Term]]) -> None:
        """Show the accuracy of further times too. `terms`: returns them by what they are, in words. Their owner keeps their state."""
        self._others.append(terms)

    def _predicted(self) -> Iterator[tuple[str, Correction]]:
        """Yield the name of each predicted quantity, and what its predictions missed."""
        for name, one in self._kept():
            if isinstance(one, Term | Correction):
                yield name, one.missed if isinstance(one, Term) else one
        for terms in self._others:
            yield from ((name, term.missed) for name, term in terms().items())

    def accuracies(self) -> dict[str, Accuracy]:
        """Return how good the newest predictions of each quantity were, by its name, once there are some of it."""
        found = ((name, missed.accuracy()) for name, missed in self._predicted())
        return {name: accuracy for name, accuracy in found if accuracy is not None and accuracy.records >= FEW}

    def observe_lengths(self, forecast: np.ndarray, tokens: np.ndarray) -> None:
        """Count responses whose lengths (n,) are far outside their forecasts, (n, S) draws, in a row across steps."""
        low, middle, high = np.quantile(forecast, (0.05, 0.5, 0.95), axis=1)
        is_far = (tokens < middle - FAR * np.maximum(middle - low, 1.0)) | (tokens > middle + FAR * np.maximum(high - middle, 1.0))
        for one in is_far.tolist():
            self.lengths.count(one)
            self.far_lengths += self.lengths.take()

    def take_far_off(self) -> list[str]:
        """Return a sentence for each quantity whose newest predictions were all far off, once until one of them is better."""
        sentences = []
        for name, missed in self._predicted():
            if missed.far.take():
                (predicted, measured, _), what = missed.made[-1], WORDS.get(name, name)
                sentences.append(f"{what}: {_MANY}; the last one was {predicted:.3g} predicted and {measured:.3g} measured")
        if self.far_lengths:
            sentences.append(f"response lengths: {_MANY}")
        self.far_lengths = 0
        return sentences

    def settle(self) -> None:
        """Fit all pending records."""
        for _, one in self._kept():
            if isinstance(one, Term | CallTimes | PoolTimes):
                one.settle()

    def _kept(self) -> Iterator[tuple[str, Term | Correction | Trial | CallTimes | PoolTimes]]:
        """Yield what is part of the state, by name."""
        for name, one in vars(self).items():
            if isinstance(one, Term | Correction | Trial | CallTimes | PoolTimes):
                yield name, one

    def state(self) -> JsonObject:
        return {name: one.state() for name, one in self._kept()}

    def restore(self, state: JsonObject) -> None:
        """Restore a state. What is missing in it keeps its seed."""
        for name, one in self._kept():
            if name in state:
                one.restore(state[name])
