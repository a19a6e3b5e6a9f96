"""Sequences → micro-batches within a token budget, with little padding. Pure functions on numpy arrays.

Two forms. *Packed*: sequences laid end to end in one row; nothing is padded, attention must keep them apart. *Padded*: one row
per sequence, as long as the longest of its micro-batch; works with any attention. Both return, for each rank, as many
micro-batches as for every other (collectives need that), so some may be empty.
"""

from __future__ import annotations

import heapq

import numpy as np

OVERHEAD_TOKENS = 128  # what one more micro-batch costs, in tokens: kernel launches, collectives


def packed(lengths: np.ndarray, max_tokens: int, ranks: int = 1) -> list[list[np.ndarray]]:
    """Micro-batches of at most `max_tokens` tokens, as few as first-fit decreasing needs (at most 11/9 of the fewest; Dósa
    2007), filled evenly rather than all but the last full.

    lengths (sequences,) int, in tokens. Returns, per rank, index arrays into `lengths`, ascending. A sequence longer than the
    budget has a micro-batch of its own.
    """
    lengths = _checked(lengths, max_tokens, ranks)
    order = np.argsort(-lengths, kind="stable")
    bins = _first_fit(lengths, order, max_tokens)
    count = -(-len(bins) // ranks) * ranks
    even = _spread(lengths, order, count)
    if all(len(part) <= 1 or int(lengths[part].sum()) <= max_tokens for part in even):
        bins = even
    return _deal([np.sort(np.array(part, np.int64)) for part in bins], [int(lengths[part].sum()) for part in bins], ranks)


def padded(lengths: np.ndarray, max_tokens: int, ranks: int = 1, overhead_tokens: int = OVERHEAD_TOKENS) -> list[list[np.ndarray]]:
    """Micro-batches of at most `max_tokens` padded tokens (rows × longest) with the least padding: of all cuts of the
    sequences sorted by length, the one with the smallest Σ rows·longest + overhead_tokens · micro-batches, exactly.

    Arguments and result as in `packed`. A larger overhead gives fewer micro-batches and more padding.
    """
    lengths = _checked(lengths, max_tokens, ranks)
    order = np.argsort(-lengths, kind="stable")
    size = lengths[order]
    budget = max_tokens
    if ranks > 1 and len(lengths):  # at least one micro-batch per rank where there are sequences enough
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


def share_prompts(prompts: np.ndarray, lengths: np.ndarray, groups: np.ndarray, max_tokens: int, width: int) -> list[np.ndarray]:
    """Put sequences of a group into rows that have their prompt once, followed by their responses.

    Of the cuts of a group into 1, 2, 4, … rows and into single sequences it takes the one with the least work. A layer's products
    with weights are about 24 · width² operations a token, those of attention 4 · width for each pair of positions. All pairs of a
    shared row are computed; of a single sequence half of them, because a causal kernel skips the others.

    Args:
        prompts, lengths: (sequences,) int, in tokens; `lengths` with the response.
        groups: (sequences,) int: equal for sequences with the same prompt.
        max_tokens: of a row with several responses.
        width: of the model's hidden states.

    Returns:
        Index arrays into `lengths`, one a row.
    """
    rows: list[np.ndarray] = []
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(order) else ():
        alone = lengths[members]
        best, least = list(members[:, None]), float((alone + alone**2 / (12 * width)).sum())
        count = 1
        while count < len(members):
            cut = np.array_split(members, count)
            sizes = np.array([prompts[part[0]] + (lengths[part] - prompts[part]).sum() for part in cut])
            work = float((sizes + sizes**2 / (6 * width)).sum())
            if work < least and sizes.max() <= max_tokens:
                best, least = cut, work
            count *= 2
        rows += best
    return rows


def layout(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a packed row: each token's position within its sequence, (Σ length,) int64, and where sequences begin and the last
    ends, (sequences + 1,) int32: `position_ids` and `cu_seqlens` of models that keep packed sequences apart."""
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return np.arange(boundaries[-1], dtype=np.int64) - np.repeat(boundaries[:-1], lengths).astype(np.int64), boundaries


def padding_share(lengths: np.ndarray, micro_batches: list[list[np.ndarray]]) -> float:
    """Share of padded positions when each micro-batch is padded to its longest: 0 to 1."""
    parts = [part for mine in micro_batches for part in mine if len(part)]
    positions = sum(int(lengths[part].max()) * len(part) for part in parts)
    return 1 - int(np.sum(lengths)) / positions if positions else 0.0


def _checked(lengths: np.ndarray, max_tokens: int, ranks: int) -> np.ndarray:
    lengths = np.asarray(lengths, np.int64)
    if max_tokens < 1 or ranks < 1 or (len(lengths) and int(lengths.min()) < 1):
        raise ValueError(f"token budget {max_tokens}, ranks {ranks} and every length must be at least 1")
    return lengths


def _first_fit(lengths: np.ndarray, order: np.ndarray, max_tokens: int) -> list[list[int]]:
    """First-fit decreasing in O(n log n): a tree of maxima finds the first bin with room."""
    leaves = 1 << max(0, int(len(order) - 1).bit_length())
    room = np.full(2 * leaves, max_tokens, np.int64).tolist()
    bins: list[list[int]] = []
    for i in order.tolist():
        need = min(int(lengths[i]), max_tokens)
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= need else 2 * node + 1
        at = node - leaves
        if at == len(bins):
            bins.append([])
        bins[at].append(i)
        room[node] -= need
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _spread(lengths: np.ndarray, order: np.ndarray, count: int) -> list[list[int]]:
    """Longest first, each into the emptiest of `count` bins (Graham 1969)."""
    heap = [(0, k) for k in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in order.tolist():
        load, k = heapq.heappop(heap)
        bins[k].append(i)
        heapq.heappush(heap, (load + int(lengths[i]), k))
    return bins


def _deal(bins: list[np.ndarray], loads: list[int], ranks: int) -> list[list[np.ndarray]]:
    """Bins of about the same load are worked on at the same time, and every rank gets about as much in all."""
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
