"""Assign groups of sequences to engines that do not all start and end at the same time."""

from __future__ import annotations

import numpy as np


def assign_engines(work_s: np.ndarray, overhead_s: np.ndarray) -> list[int]:
    """Return the engine of each group such that the last one is done as early as possible.

    The longest group gets the engine with the least overhead. This minimises max(work_s[k] + overhead_s[engine of k]):
    of two groups, giving the longer one the engine with more overhead never ends sooner. Equal engines keep the groups'
    order.

    work_s (g,): seconds that a group keeps an engine busy. overhead_s (e,), e >= g: seconds before an engine can begin,
    plus those after its end until its slot is where the next phase needs it.

    Raises ValueError if there are fewer engines than groups, or for times that are not finite.
    """
    work_s, overhead_s = np.asarray(work_s, float), np.asarray(overhead_s, float)
    if len(overhead_s) < len(work_s) or not (np.isfinite(work_s).all() and np.isfinite(overhead_s).all()):
        raise ValueError(f"{len(work_s)} groups need as many engines and finite times, got {len(overhead_s)} engines")
    used = np.sort(np.argsort(overhead_s, kind="stable")[: len(work_s)])
    if not len(used) or np.ptp(overhead_s[used]) == 0:
        return used.tolist()
    found = np.empty(len(work_s), int)
    found[np.argsort(-work_s, kind="stable")] = used[np.argsort(overhead_s[used], kind="stable")]
    return found.tolist()
