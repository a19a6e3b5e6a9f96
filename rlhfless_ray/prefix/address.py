"""Content addresses of KV pages, and the distinct ones of a step's prompts.

A page's address is a chain of hashes: the engine's fingerprint (whose pages are bytes of the same meaning), the policy version,
and the tokens of all blocks up to and including the page's. What differs in any of these is another address, so old or foreign
KV is not found rather than found and judged. The last page of a prefix may be partly filled: its block then has fewer tokens.

Pure: hashlib, numpy.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ADDRESS_BYTES = 16


def salt(version: int) -> str:
    """What a policy version adds to everything that is cached under it, in the engine and outside."""
    return f"version {version}"


def root(fingerprint: bytes, version: str) -> bytes:
    """Where the chains of one kind of engine and one policy version begin. `version`: the requests' cache salt."""
    return _digest(b"root", fingerprint, version.encode())


def chain(start: bytes, tokens: Sequence[int] | np.ndarray, block_size: int) -> list[bytes]:
    """Addresses of the blocks of `tokens` in order, the last one of a partly filled block where tokens are left over."""
    return blocks_after(start, _bytes(tokens), block_size)


def blocks_after(at: bytes, data: bytes, block_size: int) -> list[bytes]:
    """The same for tokens as the bytes of int32."""
    step, found = 4 * block_size, []
    for begin in range(0, len(data), step):
        at = _digest(at, data[begin : begin + step])
        found.append(at)
    return found


def reusable(tokens: Any) -> Any:
    """The part of a prompt (a sequence of token ids) whose KV can be taken from elsewhere: all but the last token, whose logits
    have to be computed."""
    return tokens[:-1]


def _bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    """As int32."""
    return (np.asarray(tokens, np.int32) if isinstance(tokens, np.ndarray) else array("i", tokens)).tobytes()


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=ADDRESS_BYTES).digest()


@dataclass(frozen=True)
class Node:
    """A distinct block prefix: the last block of it. Its own tokens are counted, not those before."""

    address: bytes
    parent: int  # number of the node before, -1 for a first block
    depth: int  # blocks before it
    tokens: int  # in the block: the block size, or fewer at the end of a prompt
    path_end: int  # tokens up to its end
    prompt: int  # number of one prompt that begins with it


@dataclass
class Prefixes:
    """The trie of the distinct block prefixes of some prompts, in depth-first order of first appearance."""

    block_size: int
    nodes: list[Node] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)  # of each prompt: its nodes from the root on
    uses: list[int] = field(default_factory=list)  # of each node: prompts that begin with it

    @property
    def distinct_tokens(self) -> int:
        return sum(node.tokens for node in self.nodes)

    @property
    def total_tokens(self) -> int:
        """What computing each prompt by itself would take."""
        return sum(self.nodes[n].tokens for path in self.paths for n in path)

    def leaves(self) -> list[int]:
        """Nodes that no other continues: computing these prefixes computes them all."""
        inner = {node.parent for node in self.nodes}
        return [n for n in range(len(self.nodes)) if n not in inner]


def distinct_prefixes(
    prompts: Iterable[Sequence[int] | np.ndarray], block_size: int, start: bytes = b"", *, partial: bool = True
) -> Prefixes:
    """The distinct block prefixes of the reusable part of `prompts` (token ids); what prompts share from their beginning on, in
    whole blocks, is there once. `partial`: with the partly filled last blocks. Raises ValueError for a block size below 1."""
    if block_size < 1:
        raise ValueError(f"a block has at least one token, not {block_size}")
    found = Prefixes(block_size)
    number: dict[tuple[int, bytes], int] = {}  # by the node before and the block's tokens: only what is new is hashed
    last = b""  # the prompt before: most begin as it does
    for prompt, tokens in enumerate(prompts):
        part = reusable(tokens)
        if not partial:
            part = part[: len(part) // block_size * block_size]
        data, step = _bytes(part), 4 * block_size
        shared = _shared_blocks(data, last, step)
        path: list[int] = found.paths[-1][:shared] if shared else []
        at = path[-1] if path else -1
        for begin in range(shared * step, len(data), step):
            block = data[begin : begin + step]
            known = number.get((at, block))
            if known is None:
                known = number[at, block] = len(found.nodes)
                address = _digest(found.nodes[at].address if at >= 0 else start, block)
                size, depth = len(block) // 4, begin // step
                found.nodes.append(Node(address, at, depth, size, depth * block_size + size, prompt))
                found.uses.append(0)
            at = known
            path.append(at)
        for at in path:
            found.uses[at] += 1
        last = data
        found.paths.append(path)
    return found


def _shared_blocks(one: bytes, other: bytes, step: int) -> int:
    """How many whole blocks of so many bytes two byte strings both begin with."""
    least, most = 0, min(len(one), len(other)) // step
    while least < most:
        middle = (least + most + 1) // 2
        if one[least * step : middle * step] == other[least * step : middle * step]:
            least = middle
        else:
            most = middle - 1
    return least
