"""Pack sequences into micro-batches within a token budget, with little padding. Pure functions on numpy arrays.

A micro-batch has rows, each padded to the longest. A row holds one sequence, or a prompt and several responses to it. Collectives
need the same number of micro-batches on every rank, so some may be empty.
"""

from __future__ import annotations

import heapq

import numpy as np

OVERHEAD_TOKENS = 128  # cost of one more micro-batch in tokens: kernel launches, collectives
MOST_WORK = 0.9  # prompts are shared if that takes at most this share of the work of separate rows: masks take time too


def padded(lengths: np.ndarray, max_tokens: int, ranks: int = 1, overhead_tokens: int = OVERHEAD_TOKENS) -> list[list[np.ndarray]]:
    """Pack sequences into micro-batches of at most `max_tokens` padded tokens (rows × longest) with the least padding.

    Of all divisions of the sequences sorted by length, this is the one with the smallest
    Σ rows·longest + overhead_tokens · micro-batches, exactly. `lengths` (sequences,) int, in tokens. Returns, per rank, ascending index
    arrays into `lengths`. A sequence longer than the budget has a separate micro-batch. A larger overhead gives fewer micro-batches and
    more padding.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    size = lengths[order]
    budget = max_tokens
    if ranks > 1 and len(lengths):  # at least one micro-batch per rank if there are enough sequences
        budget = min(max_tokens, max(int(size[0]), -(-int(size.sum()) // ranks)))
    cost = np.full(len(size) + 1, np.inf)
    cost[0] = 0.0
    came_from = np.zeros(len(size) + 1, np.int64)
    for i, longest in enumerate(size.tolist()):
        rows = min(len(size) - i, max(1, budget // longest))
        through = cost[i] + overhead_tokens + longest * np.arange(1, rows + 1)
        reach = slice(i + 1, i + rows + 1)
        better = through < cost[reach]
        cost[reach] = np.where(better, through, cost[reach])
        came_from[reach] = np.where(better, i, came_from[reach])
    bins, end = [], len(size)
    while end:
        bins.append(np.sort(order[came_from[end] : end]))
        end = int(came_from[end])
    return _deal(bins, [int(lengths[part].max()) * len(part) for part in bins], ranks)


def shared(
    prompts: np.ndarray, lengths: np.ndarray, groups: np.ndarray, max_tokens: int, width: int, ranks: int = 1
) -> list[list[list[np.ndarray]]]:
    """Pack sequences into micro-batches of at most `max_tokens` padded tokens whose rows hold a prompt once, followed by its responses.

    Groups are divided into at least 1, 2, 4, … rows, so that every rank has work, and the division that takes the ranks the least time
    is kept. Sequences stay in separate rows if sharing saves less than a tenth.

    Args:
        prompts, lengths: (sequences,) int, in tokens; `lengths` with the response.
        groups: (sequences,) int: equal for sequences with the same prompt.
        max_tokens: see `padded`.
        width: of the model's hidden states.
        ranks: see `padded`.

    Returns:
        Per rank its micro-batches, and of each the rows: index arrays into `lengths`.
    """

    def dealt(rows: list[np.ndarray]) -> tuple[float, list[list[list[np.ndarray]]]]:
        sizes = np.array([row_tokens(prompts, lengths, row) for row in rows], np.int64)
        parts = padded(sizes, max_tokens, ranks)
        alone = np.array([len(row) == 1 for row in rows])
        # the largest of the micro-batches that ranks work on at the same time determines their duration
        work = sum(
            OVERHEAD_TOKENS + max(_work(sizes[part], bool(alone[part].all()), width) for part in beside)
            for beside in zip(*parts, strict=True)
        )
        return work, [[[rows[i] for i in part] for part in mine] for mine in parts]

    work, best = dealt(list(np.arange(len(lengths))[:, None]))
    work *= MOST_WORK
    count, largest = 1, int(np.bincount(groups).max(initial=0)) if len(groups) else 0
    while count < largest:
        work_of_cut, cut = dealt(_shared_rows(prompts, lengths, groups, max_tokens, width, count))
        if work_of_cut < work:
            work, best = work_of_cut, cut
        count *= 2
    return best


def _shared_rows(
    prompts: np.ndarray, lengths: np.ndarray, groups: np.ndarray, max_tokens: int, width: int, least_rows: int
) -> list[np.ndarray]:
    """Cut each group into `least_rows`, 2 · `least_rows`, … rows or single sequences, whichever takes the least work and fits."""
    rows: list[np.ndarray] = []
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(order) else ():
        responses = lengths[members] - prompts[members]
        best, least = list(members[:, None]), sum(_work(lengths[[i]], True, width) for i in members)
        count = least_rows
        while count < len(members):
            spread = _spread(responses, np.argsort(-responses, kind="stable"), count)
            cut = [members[np.sort(part)] for part in spread]
            sizes = np.array([row_tokens(prompts, lengths, part) for part in cut])
            work = sum(_work(sizes[[i]], False, width) for i in range(count))
            if work < least and sizes.max() <= max_tokens:
                best, least = cut, work
            count *= 2
        rows += best
    return rows


def row_tokens(prompts: np.ndarray, lengths: np.ndarray, row: np.ndarray) -> int:
    """Return the tokens of a row that has a prompt once and then the responses of these sequences."""
    return int(prompts[row[0]] + (lengths[row] - prompts[row]).sum())


def _work(sizes: np.ndarray, alone: bool, width: int) -> float:
    """Return the work on a micro-batch whose rows have these sizes, in units of a token's products with a layer's weights.

    These are about 24 · width² operations a token; attention takes 4 · width for each pair of positions. All pairs of a shared row are
    computed. Of single sequences (`alone`) half of them are, because a causal kernel skips the others.
    """
    longest = int(sizes.max(initial=0))
    return len(sizes) * longest * (1 + longest / ((12 if alone else 6) * width))


def _spread(lengths: np.ndarray, order: np.ndarray, count: int) -> list[list[int]]:
    """Put each sequence, the longest first, into the emptiest of `count` bins (Graham 1969)."""
    heap = [(0, k) for k in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in order.tolist():
        load, k = heapq.heappop(heap)
        bins[k].append(i)
        heapq.heappush(heap, (load + int(lengths[i]), k))
    return bins


def _deal(bins: list[np.ndarray], loads: list[int], ranks: int) -> list[list[np.ndarray]]:
    """Deal bins to ranks so that bins of similar load run at the same time and every rank gets a similar total."""
    dealt: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    order = sorted(range(len(bins)), key=lambda k: -loads[k])
    for start in range(0, len(order), ranks):
        emptiest = sorted(range(ranks), key=lambda r: total[r])
        for place, rank in enumerate(emptiest):
            at = start + place
            dealt[rank].append(bins[order[at]] if at < len(order) else np.empty(0, np.int64))
            total[rank] += loads[order[at]] if at < len(order) else 0
    return dealt
