"""Pack sequences into micro-batches within a token budget, with little padding. Pure functions on numpy arrays.

A micro-batch has rows, each padded to the longest. A row holds one sequence, or a prompt and several responses to it. Or a micro-batch is
one row of sequences that lie end to end. Collectives need the same number of micro-batches on every rank, so some may be empty.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

OVERHEAD_TOKENS = 128  # cost of one more micro-batch in tokens: kernel launches, collectives
CALL_WORK = 130_000  # tokens · width² of a layer that attention of one more sequence takes: calls and small products
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
    numbers = np.arange(len(size) + 1)
    reach = np.minimum(len(size), numbers[:-1] + np.maximum(1, budget // size))  # end of the longest micro-batch from each sequence on
    first = np.searchsorted(reach, numbers)  # the first sequence from which one reaches each end
    begun = np.full(len(size) + 1, float(overhead_tokens))  # least cost of the sequences before each, and one more micro-batch
    came_from = np.zeros(len(size) + 1, np.int64)
    for end, begin in enumerate(first[1:].tolist(), 1):
        cost = begun[begin:end] + size[begin:end] * numbers[end - begin : 0 : -1]
        best = int(cost.argmin())
        came_from[end], begun[end] = begin + best, cost[best] + overhead_tokens
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

    def dealt(rows: list[np.ndarray], sizes: np.ndarray) -> tuple[float, list[list[list[np.ndarray]]]]:
        parts = padded(sizes, max_tokens, ranks)
        alone = np.array([len(row) == 1 for row in rows])
        # the largest of the micro-batches that ranks work on at the same time determines their duration
        work = sum(
            OVERHEAD_TOKENS + max(_work(sizes[part], bool(alone[part].all()), width) for part in beside)
            for beside in zip(*parts, strict=True)
        )
        return work, [[[rows[i] for i in part] for part in mine] for mine in parts]

    work, best = dealt(list(np.arange(len(lengths))[:, None]), lengths)
    work *= MOST_WORK
    order = np.argsort(groups, kind="stable")
    by_group = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(order) else []
    options = [_cuts(prompts[members[0]], lengths[members], members, max_tokens, width) for members in by_group]
    count, largest = 1, max(map(len, by_group), default=0)
    while count < largest:
        chosen = [min((alone, *(cut for cut in cuts if len(cut.rows) >= count)), key=lambda cut: cut.work) for alone, *cuts in options]
        work_of_cut, cut = dealt([row for one in chosen for row in one.rows], np.concatenate([one.sizes for one in chosen]))
        if work_of_cut < work:
            work, best = work_of_cut, cut
        count *= 2
    return best


class Units(NamedTuple):
    """What stays together in a packed row: sequences, one or several in each unit, or prompts with their responses.

    Attributes:
        lengths: (units,) int: tokens of each unit, end to end.
        row_lengths: (units,) int: tokens that each unit would have in padded rows; None: as many.
        sequences: sequences of a unit for each of which attention is called.
        masked: whether a unit has a mask, see `shared`.
    """

    lengths: np.ndarray
    row_lengths: np.ndarray | None = None
    sequences: int = 1
    masked: bool = False


def end_to_end(units: Units, max_tokens: int, width: int, ranks: int = 1) -> list[list[np.ndarray]] | None:
    """Pack units into micro-batches of at most `max_tokens` tokens, each of one row without padding.

    There are as few micro-batches as fit, of about the same size. The alternative are padded rows within `max_tokens`.

    Args:
        units: those to pack.
        max_tokens, ranks: see `padded`.
        width: see `shared`.

    Returns:
        Index arrays as those of `padded`, or None if the calls of attention take longer than the padding that they save.
    """
    lengths, row_lengths, sequences, masked = units
    if not len(lengths):
        return [[] for _ in range(ranks)]
    row_lengths = lengths if row_lengths is None else row_lengths
    order, total, longest = np.argsort(-lengths, kind="stable"), int(lengths.sum()), int(lengths.max())
    count = min(len(lengths), max(ranks, -(-total // max_tokens)))
    while True:
        bins = _spread(lengths, order, count)
        loads = [int(lengths[part].sum()) for part in bins]
        if max(loads) <= max(max_tokens, longest):
            break
        count += 1
    work = (lengths * _work_per_token(lengths / sequences, not masked, width)).sum()
    work += sequences * len(lengths) * CALL_WORK / width**2
    rows = padded(row_lengths, max_tokens, ranks)
    of_padded = 0.0
    for part in (part for mine in rows for part in mine):
        size = int(row_lengths[part].max(initial=0))
        of_padded += len(part) * size * _work_per_token(size / sequences, not masked, width)
    batches = max(map(len, rows)) - -(-count // ranks)
    if work >= of_padded + ranks * batches * OVERHEAD_TOKENS:
        return None
    return _deal([np.sort(np.array(part, np.int64)) for part in bins], loads, ranks)


class _Cut(NamedTuple):
    """A division of a group into rows of sequences, the tokens of each row, and the work on all of them."""

    rows: list[np.ndarray]
    sizes: np.ndarray
    work: float


def _cuts(prompt: int, lengths: np.ndarray, members: np.ndarray, max_tokens: int, width: int) -> list[_Cut]:
    """Return the divisions of a group that fit: into single sequences first, then into 1, 2, 4, … rows."""
    cuts = [_Cut(list(members[:, None]), lengths, _work_of_rows(lengths, True, width))]
    responses, count = lengths - prompt, 1
    order = np.argsort(-responses, kind="stable")
    while count < len(members):
        rows = _spread(responses, order, count)
        sizes = np.array([prompt + responses[row].sum() for row in rows], np.int64)
        if sizes.max() <= max_tokens:
            cuts.append(_Cut([members[np.sort(row)] for row in rows], sizes, _work_of_rows(sizes, False, width)))
        count *= 2
    return cuts


def _work_of_rows(sizes: np.ndarray, alone: bool, width: int) -> float:
    """Return the work on rows of these sizes if each is a micro-batch, see `_work_per_token`."""
    return sum((sizes * _work_per_token(sizes, alone, width)).tolist())


def row_tokens(prompts: np.ndarray, lengths: np.ndarray, row: np.ndarray) -> int:
    """Return the tokens of a row that has a prompt once and then the responses of these sequences."""
    return int(prompts[row[0]] + (lengths[row] - prompts[row]).sum())


def _work(sizes: np.ndarray, alone: bool, width: int) -> float:
    """Return the work on a micro-batch whose rows have these sizes, padded to the longest, see `_work_per_token`."""
    longest = int(sizes.max(initial=0))
    return len(sizes) * longest * _work_per_token(longest, alone, width)


def _work_per_token(size: Any, alone: bool, width: int) -> Any:
    """Return the work on each token of rows of `size` tokens (a number or an array), in units of its products with a layer's weights.

    These are about 24 · width² operations a token; attention takes 4 · width for each pair of positions. All pairs of a shared row are
    computed. Of single sequences (`alone`) half of them are, because a causal kernel skips the others.
    """
    return 1 + size / ((12 if alone else 6) * width)


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
