"""Find out within a run whether a measure pays: some of the steps that would take it do not, and both kinds are compared.

What a measure such as a move of sequences saves is small beside the error of the times that it is predicted from, and what it costs is
spread over all that it disturbs. So it is not judged by its own prediction alone. Of the steps for which the planner wants it, a part goes
without, and the run's own times and costs say which was better.
"""

from __future__ import annotations

import math

import numpy as np

from placement.plain_data import JsonObject

KEEP = 128  # newest steps
FADE = 0.97  # factor on a step's weight for each newer one
FEW = 4  # steps of each kind before they are compared, for a measure that saves little
AGAIN = 8  # steps of the better kind before one of the other; for each later one as many more, up to `MOST_AGAIN` times
MOST_AGAIN = 4
DOUBT = 1.0  # standard errors by which the measure must be better: without evidence it is not taken
MIN_SPREAD = 0.02  # least relative standard deviation of a step's ratio: few records may agree by chance


class Trial:
    """Compares steps with and without a measure by the ratio of what they took to what was planned.

    Both ratios are of the same models, so an error that they have in common cancels.
    """

    def __init__(self, few: int = FEW) -> None:
        """`few`: steps of each kind before they are compared, at least 2."""
        self.few = few
        self.values = np.empty((0, 2))  # 1 with the measure and 0 without, and log of measured over planned
        self.since = 0  # steps since the last of the kind that seems worse

    def decide(self) -> bool:
        """Decide whether the next step that would take the measure takes it."""
        taken, left = self._counts()
        if taken < self.few or left < self.few:
            return taken <= left
        better = self.saving > 0
        other = left if better else taken
        tries_other = self.since >= AGAIN * min(max(1, other - self.few + 1), MOST_AGAIN)
        return better != tries_other

    @property
    def saving(self) -> float:
        """Relative saving by the measure, less what it may be too high by. Not finite before there are two steps of both kinds."""
        means, errors = [], []
        weight = FADE ** np.arange(len(self.values) - 1, -1, -1.0)
        for kind in (0, 1):
            at = self.values[:, 0] == kind
            if at.sum() < 2:
                return -math.inf
            share = weight[at] / weight[at].sum()
            mean = float(share @ self.values[at, 1])
            spread = max(float(share @ (self.values[at, 1] - mean) ** 2), MIN_SPREAD**2)
            means.append(mean)
            errors.append(spread * float((share**2).sum()))
        return means[0] - means[1] - DOUBT * math.sqrt(sum(errors))

    @property
    def reason(self) -> str:
        """Say what the trial has found, for the reason of a decision."""
        taken, left = self._counts()
        if taken < self.few or left < self.few:
            return f"on trial: {taken} steps with and {left} without"
        return f"saved at least {self.saving:.1%} in {taken} steps, beside {left} without"

    def _counts(self) -> tuple[int, int]:
        """Return the steps with the measure and without."""
        taken = int(self.values[:, 0].sum())
        return taken, len(self.values) - taken

    def observe(self, taken: bool, ratio: float) -> None:
        """Record a step that would have taken the measure. `ratio`: what it took over what was planned. Ignores what is not positive."""
        if not (0 < ratio < math.inf):
            return
        is_better = min(self._counts()) >= self.few and taken == (self.saving > 0)
        self.since = self.since + 1 if is_better else 0
        self.values = np.vstack([self.values, [float(taken), math.log(ratio)]])[-KEEP:]

    def state(self) -> JsonObject:
        return {"values": self.values.tolist(), "since": self.since}

    def restore(self, state: JsonObject) -> None:
        self.values = np.array(state["values"], float).reshape(-1, 2)
        self.since = state["since"]
