"""An event-driven model of a learner that works while the last responses are still being generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LearnerWork:
    """The learner's input: n finished responses.

    finish_s, tokens (n,): when each ended, and its tokens with the prompt. group (n,): whose advantages it shares (-1:
    its own only). gradients: models whose gradients may be taken before the last response.
    """

    finish_s: np.ndarray
    tokens: np.ndarray
    group: np.ndarray
    gradients: float


@dataclass(frozen=True)
class LearnerDevices:
    """A learner of `early` devices from `from_s` on, which has `late` devices once the rollout is over."""

    early: int
    late: int
    from_s: float
    rollout_end_s: float


@dataclass(frozen=True)
class LearnerCosts:
    """Seconds of the learner's work, by tokens and devices.

    prepare_s: forward passes before learning. gradients_s: gradients of one model. resize_s: resharding to another
    number of devices. finish_s: what follows when all of that is done (gradients that had to wait, optimizer updates).
    """

    prepare_s: Callable[[float, int], float]
    gradients_s: Callable[[float, int], float]
    resize_s: Callable[[int, int], float]
    finish_s: Callable[[float, int], float]
    batch_tokens: int  # per device and micro-batch, after the rollout
    early_tokens: Callable[[int], int]  # the same during the rollout: small to end soon, large enough to pay for transfers


@dataclass(frozen=True)
class LearnerResult:
    """The times at which the learner was done and had grown, and its device-seconds of work before it grew and in all."""

    end_s: float
    grown_s: float
    early_busy: float
    busy: float


def run_learner(work: LearnerWork, learner: LearnerDevices, costs: LearnerCosts) -> LearnerResult:
    """Process all work in micro-batches, gradients of complete groups first.

    Events: a response ends, a micro-batch ends, the rollout is over. An ended response allows its forward passes, in
    the order of ending. The last response of a group also allows the group's gradients. During the rollout a
    micro-batch has size × early_tokens(size) tokens, and the learner waits for that many. Afterwards it has up to size
    × batch_tokens. When the rollout is over the learner changes to its late size after the current batch.
    """
    order = np.argsort(work.finish_s, kind="stable")
    finish, arrived = work.finish_s[order], np.r_[0.0, np.cumsum(work.tokens[order])]
    unlocked = _unlocked(work, order)
    n, total = len(order), float(arrived[-1])
    size, now, busy, early_busy = learner.early, learner.from_s, 0.0, 0.0
    prepared, learned, grown = 0, 0.0, None
    while prepared < n or unlocked[prepared] > learned + 1e-9:
        if grown is None and now >= learner.rollout_end_s:
            early_busy = busy
            now += costs.resize_s(size, learner.late)
            size, grown = learner.late, now
        full = float(size * (costs.early_tokens(size) if grown is None else costs.batch_tokens))
        least = 0.0 if grown is not None else 0.999 * full
        here = int(np.searchsorted(finish, now + 1e-12, side="right"))
        gradients, forward = unlocked[prepared] - learned, arrived[here] - arrived[prepared]
        if gradients > max(least, 1e-9):
            tokens = min(full, gradients)
            learned += tokens
            spent = work.gradients * costs.gradients_s(tokens, size)
        elif here > prepared and (grown is not None or forward > least):  # also responses without a token of their own
            upto = int(np.searchsorted(arrived, arrived[prepared] + full, side="right")) - 1
            upto = min(here, max(upto, prepared + 1))
            spent = costs.prepare_s(float(arrived[upto] - arrived[prepared]), size)
            prepared = upto
        else:  # wait for enough ended responses, or the end of the rollout
            enough = int(np.searchsorted(arrived, arrived[prepared] + least, side="right"))
            now = min(learner.rollout_end_s, float(finish[enough - 1])) if enough <= n else learner.rollout_end_s
            continue
        now, busy = now + spent, busy + spent * size
    if grown is None:
        early_busy = busy
        now = max(now, learner.rollout_end_s)
        now += costs.resize_s(size, learner.late)
        size, grown = learner.late, now
    last = costs.finish_s(total, size)
    return LearnerResult(now + last, grown, early_busy, busy + last * size)


def _unlocked(work: LearnerWork, order: np.ndarray) -> np.ndarray:
    """Return (n + 1,) tokens whose gradients may be taken once the first k responses, in order of ending, are prepared."""
    tokens, n = work.tokens[order], len(order)
    if not work.gradients:
        return np.zeros(n + 1)
    group = work.group[order]
    gain = np.where(group < 0, tokens, 0.0)
    shared = np.flatnonzero(group >= 0)
    if len(shared):
        index = group[shared]
        last = np.zeros(int(index.max()) + 1, int)
        np.maximum.at(last, index, shared)
        np.add.at(gain, last[np.unique(index)], np.bincount(index, tokens[shared])[np.unique(index)])
    return np.r_[0.0, np.cumsum(gain)]
