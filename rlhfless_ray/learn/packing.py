"""Sequences → micro-batches within a token budget, with little padding. Pure functions on numpy arrays.

A micro-batch has rows, each padded to the longest. A row holds one sequence, or a prompt and several responses to it. Every rank
gets as many micro-batches as every other (collectives need that), so some may be empty.
"""

from __future__ import annotations

import heapq

import numpy as np

OVERHEAD_TOKENS = 128  # what one more micro-batch costs, in tokens: kernel launches, collectives
WORTH_SHARING = 0.9  # rows are shared where they cost at most this share of what separate ones do: masks take time too

Rows = list[np.ndarray]  # of a micro-batch: indices of each row's sequences


def micro_batches(
    prompts: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray, max_tokens: int, ranks: int, attention_tokens: int | None
) -> list[list[Rows]]:
    """Cut sequences into each rank's micro-batches, with rows that share a prompt where these cost less.

    Groups are split into 1, 2, 4 … rows until each sequence has its own, and the cheapest split is taken. A row of n tokens costs
    n + n²/attention_tokens: attention works on every pair of a shared row's tokens, and on half of them in a sequence alone.

    Args:
        prompts: (sequences,), equal where sequences have the same prompt.
        prompt_lengths: (sequences,), in tokens.
        lengths: (sequences,), in tokens, of prompt and response.
        max_tokens: see `padded`.
        ranks: see `padded`.
        attention_tokens: length at which attention costs as much as all else. None: no row is shared.
    """
    alone: Rows = list(np.arange(len(lengths))[:, None])
    separate = _of_rows(alone, padded(lengths, max_tokens, ranks))
    members = np.bincount(prompts).max(initial=0) if len(prompts) else 0
    if attention_tokens is None or members < 2:
        return separate
    best, cheapest = separate, WORTH_SHARING * _cost(separate, prompt_lengths, lengths, attention_tokens)
    count = 1
    while count < members:
        rows = _shared_rows(prompts, prompt_lengths, lengths, max_tokens, count)
        sizes = np.array([_row_tokens(row, prompt_lengths, lengths) for row in rows])
        dealt = _of_rows(rows, padded(sizes, max_tokens, ranks))
        if (cost := _cost(dealt, prompt_lengths, lengths, attention_tokens)) < cheapest:
            best, cheapest = dealt, cost
        count *= 2
    return best


def _shared_rows(prompts: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray, max_tokens: int, count: int) -> Rows:
    """At least `count` rows for each prompt, and as many as the budget asks for."""
    rows: Rows = []
    for prompt in np.unique(prompts):
        members = np.flatnonzero(prompts == prompt)
        header = int(prompt_lengths[members[0]])
        responses = lengths[members] - header
        order = np.argsort(-responses, kind="stable")
        room = max(1, max_tokens - header)
        parts = min(len(members), max(count, -(-int(responses.sum()) // room)))
        while True:
            bins = _spread(responses, order, parts)
            if parts == len(members) or max(int(responses[part].sum()) for part in bins) <= room:
                break
            parts += 1
        rows += [members[np.sort(part)] for part in bins]
    return rows


def _row_tokens(row: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray) -> int:
    """Tokens of a row: those of its prompt once, and those of its responses."""
    return int(lengths[row].sum() - prompt_lengths[row[1:]].sum())


def _of_rows(rows: Rows, dealt: list[list[np.ndarray]]) -> list[list[Rows]]:
    return [[[rows[i] for i in part] for part in mine] for mine in dealt]


def _cost(dealt: list[list[Rows]], prompt_lengths: np.ndarray, lengths: np.ndarray, attention_tokens: int) -> float:
    """Cost in tokens. Ranks work side by side, so of micro-batches at the same time the largest counts."""

    def cost(rows: Rows) -> float:
        longest = max((_row_tokens(row, prompt_lengths, lengths) for row in rows), default=0)
        pairs = 1.0 if any(len(row) > 1 for row in rows) else 0.5
        return len(rows) * longest * (1 + pairs * longest / attention_tokens)

    return sum(OVERHEAD_TOKENS + max(map(cost, side_by_side)) for side_by_side in zip(*dealt, strict=True))


def padded(lengths: np.ndarray, max_tokens: int, ranks: int = 1, overhead_tokens: int = OVERHEAD_TOKENS) -> list[list[np.ndarray]]:
    """Micro-batches of at most `max_tokens` padded tokens (rows × longest) with the least padding: of all cuts of the
    sequences sorted by length, the one with the smallest Σ rows·longest + overhead_tokens · micro-batches, exactly.

    lengths (sequences,) int, in tokens. Returns, per rank, index arrays into `lengths`, ascending. A sequence longer than the
    budget has a micro-batch of its own. A larger overhead gives fewer micro-batches and more padding.
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
