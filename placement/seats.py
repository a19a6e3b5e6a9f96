"""Which engine gets which group of sequences, where engines do not all begin and end alike."""

from __future__ import annotations

import numpy as np


def seats(work_s: np.ndarray, around_s: np.ndarray) -> list[int]:
    """The engine of each group, so that the last to be done is done soonest: the longest group on the engine with the least around it.

    work_s (g,): seconds that a group keeps an engine busy; around_s (e,), e >= g: seconds before an engine can begin and after it
    has ended until its slot is where the next phase wants it. Minimises max(work_s[k] + around_s[engine of k]): of two groups, to
    give the longer one the engine with more around it never ends sooner. Engines that are alike keep the order of the groups.
    Raises ValueError when there are fewer engines than groups, or for times that are not finite.
    """
    work_s, around_s = np.asarray(work_s, float), np.asarray(around_s, float)
    if len(around_s) < len(work_s) or not (np.isfinite(work_s).all() and np.isfinite(around_s).all()):
        raise ValueError(f"{len(work_s)} groups need as many engines and finite times, got {len(around_s)} engines")
    used = np.sort(np.argsort(around_s, kind="stable")[: len(work_s)])
    if not len(used) or np.ptp(around_s[used]) == 0:
        return used.tolist()
    found = np.empty(len(work_s), int)
    found[np.argsort(-work_s, kind="stable")] = used[np.argsort(around_s[used], kind="stable")]
    return found.tolist()
