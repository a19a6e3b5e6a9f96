"""Count the prefix tokens that a step's prompts need, for the planner. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from placement.scaling.prefix_benefit import PrefixDemand
from rlhfless_ray.prefix.block_hash import Prefixes, distinct_prefixes


def prefix_demand(prompts: Sequence[Sequence[int]], shares: Sequence[np.ndarray], block_size: int) -> PrefixDemand:
    """Count the demand of prompts (token ids) on engines. `shares`: for each engine, the prompt position of every request.

    Without pages, an engine computes each full block of its prompts once, and the tokens after the last full block for every
    request. With pages, it copies each full block once and a partly filled one for every request, and computes one token of
    each. Engines without requests do not count. Raises ValueError if no engine has a request.
    """
    used = [np.asarray(share, int) for share in shares if len(share)]
    if not used:
        raise ValueError("no engine has a request")
    trie = distinct_prefixes(prompts, block_size)
    full = [[n for n in path if trie.nodes[n].tokens == block_size] for path in trie.paths]
    off, load, fetch = [], [], []
    for share in used:
        times = Counter(share.tolist())
        blocks = {n for prompt in times for n in full[prompt]}
        tails = sum(count * (len(prompts[p]) - block_size * len(full[p])) for p, count in times.items())
        partly = sum(count * (len(trie.paths[p]) - len(full[p])) for p, count in times.items())
        off.append(block_size * len(blocks) + tails)
        load.append(len(blocks) + partly)
        fetch.append(len({n for prompt in times for n in trie.paths[prompt]}))
    return PrefixDemand(
        block_size, trie.distinct_tokens, len(trie.nodes), _trunk(trie, full), np.array(off),
        np.array([len(share) for share in used]), np.array(load), np.array(fetch),
    )  # fmt: skip


def _trunk(trie: Prefixes, full: list[list[int]]) -> int:
    """Return the number of tokens in full blocks that every prompt begins with."""
    everyone = len(trie.paths)
    return trie.block_size * sum(trie.uses[n] == everyone for n in full[0]) if full else 0
