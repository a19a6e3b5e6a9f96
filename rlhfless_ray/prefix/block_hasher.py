"""Name a request's KV blocks inside vLLM by the addresses of their pages.

vLLM pickles and hashes every full block of every request. For a prompt of a thousand tokens that takes longer than all other
work for the request. The samples of a group share one prompt, and page addresses identify the same content. With them as block
names, the connector reads them from the request, and each engine hashes a prompt once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from rlhfless_ray.prefix.block_hash import blocks_after

MAX_PROMPTS, MAX_TOKENS = 4096, 2_000_000  # prompts whose hashes are cached, and their tokens: about 17 MB


def is_identified_by_tokens(request: Any) -> bool:
    """Return whether tokens and version alone determine a request's KV."""
    return bool(request.cache_salt) and not (request.mm_features or request.lora_request or request.prompt_embeds is not None)


class BlockHasher:
    """vLLM's block hasher for an engine whose layers form one KV group.

    Uses `block_hashes`, `num_tokens`, `all_token_ids` and `cache_salt` of vLLM's `Request`.
    """

    def __init__(self, start: Callable[[str], bytes], block_size: int, fallback: Callable[[Any], list[bytes]]) -> None:
        """`start`: maps a cache salt to the root of addresses. `fallback`: vLLM's hasher, for requests with more than tokens."""
        self.start, self.block_size, self.fallback = start, block_size, fallback
        self.known: dict[tuple[str, bytes], list[bytes]] = {}  # by salt and tokens
        self.tokens = 0  # in `known`

    def __call__(self, request: Any) -> list[bytes]:
        """Return the names of the full blocks that have none yet, in order."""
        named, full = len(request.block_hashes), request.num_tokens // self.block_size
        if full <= named:
            return []
        if not is_identified_by_tokens(request):
            return self.fallback(request)
        data = array("i", request.all_token_ids[named * self.block_size : full * self.block_size]).tobytes()
        if named:
            return blocks_after(request.block_hashes[-1], data, self.block_size)
        key = request.cache_salt, data
        if key not in self.known:
            tokens = full * self.block_size
            if len(self.known) >= MAX_PROMPTS or self.tokens + tokens > MAX_TOKENS:
                self.known.clear()
                self.tokens = 0
            self.tokens += tokens
            self.known[key] = blocks_after(self.start(request.cache_salt), data, self.block_size)
        return list(self.known[key])
