"""Content addresses of KV pages, and the distinct block prefixes of a step's prompts.

A page's address is a chain of hashes over the engine's fingerprint, the policy version, and the tokens of all blocks up to and
including the page's. Engines with the same fingerprint give the bytes of a page the same meaning. Old or foreign KV has another
address, so it is never found. The last block of a prefix may be partly filled.

Pure: hashlib, numpy.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

ADDRESS_BYTES = 16


def salt(version: int) -> str:
    """Return the cache salt of a policy version, used by the engine's own cache and for pages."""
    return f"version {version}"


def root(fingerprint: bytes, version: str) -> bytes:
    """Return the first link of all chains of one kind of engine and one policy version (`version`: the requests' cache salt)."""
    return _digest(b"root", fingerprint, version.encode())


def chain(start: bytes, tokens: Sequence[int] | np.ndarray, block_size: int) -> list[bytes]:
    """Return the addresses of the blocks of `tokens` in order, including a partly filled last block."""
    return blocks_after(start, _bytes(tokens), block_size)


def blocks_after(at: bytes, data: bytes, block_size: int) -> list[bytes]:
    """Continue a chain at `at` with tokens given as the bytes of int32."""
    step, addresses = 4 * block_size, []
    for begin in range(0, len(data), step):
        at = _digest(at, data[begin : begin + step])
        addresses.append(at)
    return addresses


def _bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Convert to the bytes of int32."""
    return (np.asarray(tokens, np.int32) if isinstance(tokens, np.ndarray) else array("i", tokens)).tobytes()


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=ADDRESS_BYTES).digest()


@dataclass(frozen=True)
class Node:
    """A distinct block prefix, represented by its last block. Only that block's tokens are counted."""

    address: bytes
    parent: int  # index of the preceding node, -1 for a first block
    depth: int  # blocks before it
    tokens: int  # in this block: the block size, or fewer at the end of a prompt
    path_end: int  # tokens up to its end
    prompt: int  # index of one prompt that begins with it


@dataclass
class Prefixes:
    """The trie of the distinct block prefixes of some prompts, in depth-first order of first appearance."""

    block_size: int
    nodes: list[Node] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)  # nodes of each prompt, from the root
    uses: list[int] = field(default_factory=list)  # number of prompts that begin with each node

    @property
    def distinct_tokens(self) -> int:
        return sum(node.tokens for node in self.nodes)


def distinct_prefixes(prompts: Iterable[Sequence[int] | np.ndarray], block_size: int, start: bytes = b"") -> Prefixes:
    """Build the trie of `prompts` (token ids) without their last tokens, whose logits must be computed.

    Blocks that prompts share from the start are contained once. The last one may be partly filled. Raises ValueError for a block size
    below 1.
    """
    if block_size < 1:
        raise ValueError(f"a block has at least one token, not {block_size}")
    trie = Prefixes(block_size)
    number: dict[tuple[int, bytes], int] = {}  # by parent node and block tokens, so that only new blocks are hashed
    last = b""  # the previous prompt, with which most share a prefix
    for prompt, tokens in enumerate(prompts):
        data, step = _bytes(tokens[:-1]), 4 * block_size
        shared = _shared_blocks(data, last, step)
        path: list[int] = trie.paths[-1][:shared] if shared else []
        at = path[-1] if path else -1
        for begin in range(shared * step, len(data), step):
            block = data[begin : begin + step]
            known = number.get((at, block))
            if known is None:
                known = number[at, block] = len(trie.nodes)
                address = _digest(trie.nodes[at].address if at >= 0 else start, block)
                size, depth = len(block) // 4, begin // step
                trie.nodes.append(Node(address, at, depth, size, depth * block_size + size, prompt))
                trie.uses.append(0)
            at = known
            path.append(at)
        for at in path:
            trie.uses[at] += 1
        last = data
        trie.paths.append(path)
    return trie


def _shared_blocks(one: bytes, other: bytes, step: int) -> int:
    """Return how many whole blocks of `step` bytes two byte strings share from the start."""
    low, high = 0, min(len(one), len(other)) // step
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * step : middle * step] == other[low * step : middle * step]:
            low = middle
        else:
            high = middle - 1
    return low
