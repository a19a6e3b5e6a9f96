"""The learner at work while the last responses are still being generated: a queue, event by event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Work:
    """What n finished responses bring to the learner.

    finish_s, tokens (n,): when each ended, and its tokens with the prompt; group (n,): whose advantages it shares (-1:
    nobody's, they are its own). gradients: models whose gradients may be taken before the last response, each counted by
    what it costs in training passes; later: the same once all have ended.
    """

    finish_s: np.ndarray
    tokens: np.ndarray
    group: np.ndarray
    gradients: float
    later: float | None = None


@dataclass(frozen=True)
class Gang:
    """A learner of `early` devices from `from_s` on that has `late` devices once the rollout is over, at `over_s`."""

    early: int
    late: int
    from_s: float
    over_s: float


@dataclass(frozen=True)
class Costs:
    """Seconds by tokens and devices: the forward passes that prepare, gradients of one model, resharding to another size,
    and what follows when all of that is done (gradients that had to wait, optimizer updates)."""

    prepare_s: Callable[[float, int], float]
    gradients_s: Callable[[float, int], float]
    regang_s: Callable[[int, int], float]
    finish_s: Callable[[float, int], float]
    batch_tokens: int  # per device and micro-batch, when nothing is waited for
    early_tokens: Callable[[int], int]  # the same before the last response: small, so that a batch ends soon, but worth its transfers


@dataclass(frozen=True)
class Done:
    """When the learner was done and when it had grown; device-seconds it worked, before it grew and in all."""

    end_s: float
    grown_s: float
    early_busy: float
    busy: float


def serve(work: Work, gang: Gang, costs: Costs) -> Done:
    """Serve all work in micro-batches, gradients of complete groups first.

    Events: a response ends (its forward passes may run, in the order of ending; with its group's last its gradients too), a
    micro-batch ends, the rollout is over. Until then batches have gang × early_tokens(gang) tokens (fewer are waited with),
    later up to gang × batch_tokens. When the rollout is over the gang changes to its later size after the batch it is in.
    """
    order = np.argsort(work.finish_s, kind="stable")
    finish, arrived = work.finish_s[order], np.r_[0.0, np.cumsum(work.tokens[order])]
    unlocked = _unlocked(work, order)
    n, total = len(order), float(arrived[-1])
    size, now, busy, early_busy = gang.early, gang.from_s, 0.0, 0.0
    prepared, learned, grown = 0, 0.0, None
    while prepared < n or unlocked[prepared] > learned + 1e-9:
        if grown is None and now >= gang.over_s:
            early_busy = busy
            now += costs.regang_s(size, gang.late)
            size, grown = gang.late, now
        full = float(size * (costs.early_tokens(size) if grown is None else costs.batch_tokens))
        least = 0.0 if grown is not None else 0.999 * full
        here = int(np.searchsorted(finish, now + 1e-12, side="right"))
        gradients, forward = unlocked[prepared] - learned, arrived[here] - arrived[prepared]
        if gradients > max(least, 1e-9):
            tokens = min(full, gradients)
            learned += tokens
            models = work.gradients if grown is None or work.later is None else work.later
            spent = models * costs.gradients_s(tokens, size)
        elif forward > max(least, 1e-9):
            upto = int(np.searchsorted(arrived, arrived[prepared] + full, side="right")) - 1
            upto = min(here, max(upto, prepared + 1))
            spent = costs.prepare_s(float(arrived[upto] - arrived[prepared]), size)
            prepared = upto
        else:  # wait until enough has ended, or the rollout is over
            enough = int(np.searchsorted(arrived, arrived[prepared] + least, side="right"))
            now = min(gang.over_s, float(finish[enough - 1])) if enough <= n else gang.over_s
            continue
        now, busy = now + spent, busy + spent * size
    if grown is None:
        early_busy = busy
        now = max(now, gang.over_s)
        now += costs.regang_s(size, gang.late)
        size, grown = gang.late, now
    last = costs.finish_s(total, size)
    return Done(now + last, grown, early_busy, busy + last * size)


def _unlocked(work: Work, order: np.ndarray) -> np.ndarray:
    """(n + 1,) tokens whose gradients may be taken once the first k responses, in the order of ending, are prepared."""
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
