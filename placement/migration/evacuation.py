"""Decide how the sequences of a node that will be removed leave it, and when.

The node works until its sequences must leave: those that end before need no move. Tokens are streamed, so a node that goes earlier than
announced costs one interval of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESERVE_S = 1.0  # between the last transfer and the removal: clouds stop a node up to a second early
CUT_S = 0.5  # for the last reports of an engine, without which tokens are generated again


@dataclass(frozen=True)
class MoveTimes:
    """Seconds of a move by its method: (fixed, for each token of the context). `pages` is None if engines cannot copy KV pages."""

    prefill: tuple[float, float]
    pages: tuple[float, float] | None = None

    def seconds(self, context: np.ndarray | float) -> np.ndarray:
        """Return (methods, n) seconds until the first token on the new engine, for contexts (n,) in tokens: by prefill, by pages."""
        methods = [self.prefill] if self.pages is None else [self.prefill, self.pages]
        return np.array([fixed + per_token * context for fixed, per_token in methods])


@dataclass(frozen=True)
class Evacuation:
    """How sequences leave a node.

    Attributes:
        wait_s: seconds for which they decode on where they are; 0: they leave now.
        pages: (n,) bool, whose KV pages are copied. The new engines compute the contexts of the others again.
        reason: for logs.
    """

    wait_s: float
    pages: np.ndarray
    reason: str


def plan_evacuation(context: np.ndarray, notice_s: float | None, times: MoveTimes) -> Evacuation:
    """Plan how the sequences of a node leave it.

    Args:
        context: (n,) tokens of each sequence, prompt included.
        notice_s: seconds until the node is removed. None: it will be removed at an unknown time.

    Pages go where they are faster than prefill, and only as many as the node can send in time: those that save most first. A prefill
    needs nothing of the old node.
    """
    context = np.asarray(context, float)
    pages = np.zeros(len(context), bool)
    if times.pages is not None and len(context):
        by_prefill, by_pages = times.seconds(context)
        gain_s = by_prefill - by_pages
        pages = gain_s > 0
        if notice_s is not None:
            order = np.argsort(-gain_s, kind="stable")
            sums_s = np.cumsum(np.where(pages, times.pages[1] * context, 0.0)[order])  # one after the other: a node has one link
            pages[order] &= times.pages[0] + sums_s <= notice_s - RESERVE_S
    if notice_s is None:
        return Evacuation(0.0, pages, "the node will be removed")
    sent_s = times.pages[0] + times.pages[1] * float(context[pages].sum()) if times.pages is not None and pages.any() else 0.0
    wait_s = max(0.0, notice_s - RESERVE_S - CUT_S - sent_s)
    if wait_s > 0:
        return Evacuation(wait_s, pages, f"the node is removed in {notice_s:.0f} s: it works on for {wait_s:.0f} s")
    how = f"{int(pages.sum())} by pages, {int((~pages).sum())} by prefill"
    return Evacuation(0.0, pages, f"the node is removed in {max(0.0, notice_s):.1f} s: {how}")
