"""Find out within a run whether moves pay: some rollouts that would move sequences hold them where they are, and both are compared.

A move's predicted saving is small beside the error of the rollout time that it is taken from, and what it costs is spread over all
sequences of two engines. So neither is judged move by move. Of the rollouts for which the planner wants moves, a part makes none, and the
run's own times and costs say which was better.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

FADE = 0.97  # factor on a rollout's weight for each newer one
FEW = 4  # rollouts of each kind before they are compared
AGAIN = 8  # rollouts of the better kind, for one of the other, for each rollout of that kind so far up to `MOST_AGAIN` times as many
MOST_AGAIN = 4
DOUBT = 1.0  # standard errors by which moves must be better: without evidence they are not made
MIN_SPREAD = 0.02  # least relative standard deviation of a rollout's value: few records may agree by chance


class MoveTrial:
    """Compares rollouts with and without moves by the ratio of what they took to what was planned.

    Both ratios are of the same models, so an error that they have in common cancels.
    """

    def __init__(self) -> None:
        self.values = np.empty((0, 2))  # 1 with moves and 0 without, and log of measured over planned
        self.since = 0  # rollouts since the last of the kind that seems worse

    def decide(self) -> bool:
        """Decide whether the next rollout that would move sequences moves them."""
        made, held = (int((self.values[:, 0] == kind).sum()) for kind in (1, 0))
        if made < FEW or held < FEW:
            return made <= held
        better = self.saving > 0
        other = held if better else made
        tries_other = self.since >= AGAIN * min(max(1, other - FEW + 1), MOST_AGAIN)
        return better != tries_other

    @property
    def saving(self) -> float:
        """Relative saving by moves, less what it may be too high by. Not finite before there are a few rollouts of both kinds."""
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
        made, held = (int((self.values[:, 0] == kind).sum()) for kind in (1, 0))
        if made < FEW or held < FEW:
            return f"on trial: {made} rollouts with moves and {held} without"
        return f"moves saved at least {self.saving:.1%} in {made} rollouts, beside {held} without"

    def observe(self, moved: bool, ratio: float) -> None:
        """Record a rollout that would have moved sequences. `ratio`: what it took over what was planned. Ignores what is not positive."""
        if not (0 < ratio < math.inf):
            return
        made = (self.values[:, 0] == 1).sum() >= FEW and (self.values[:, 0] == 0).sum() >= FEW
        self.since = self.since + 1 if made and moved == (self.saving > 0) else 0
        self.values = np.vstack([self.values, [float(moved), math.log(ratio)]])[-128:]

    def state(self) -> dict[str, Any]:
        return {"values": self.values.tolist(), "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        self.values = np.array(state["values"], float).reshape(-1, 2)
        self.since = state["since"]
