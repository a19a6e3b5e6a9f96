"""The names of a request's KV blocks inside vLLM: the addresses of their pages.

vLLM names the full blocks of every request by itself, each by pickling and hashing it; for a prompt of a thousand tokens that takes
longer than all else that is done for the request. A group's samples have one prompt, and its pages have addresses that say
the same. So these addresses are vLLM's names too: the connector reads them off the request, and a prompt is hashed once for each engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from rlhfless_ray.prefix.address import blocks_after

MOST = 4096  # prompts that are remembered


def plain(request: Any) -> bool:
    """Whether tokens and version say everything about a request's KV."""
    return bool(request.cache_salt) and not (request.mm_features or request.lora_request or request.prompt_embeds is not None)


class BlockHasher:
    """vLLM's block hasher of an engine whose layers are one KV group.

    Of a request (vLLM's `Request`) it uses `block_hashes`, `num_tokens`, `all_token_ids` and `cache_salt`.
    """

    def __init__(self, start: Callable[[str], bytes], block_size: int, otherwise: Callable[[Any], list[bytes]]) -> None:
        """`start`: the root of the addresses under a cache salt. `otherwise`: vLLM's own, for requests that are not `plain`."""
        self.start, self.block_size, self.otherwise = start, block_size, otherwise
        self.known: dict[tuple[str, bytes], list[bytes]] = {}  # by salt and tokens

    def __call__(self, request: Any) -> list[bytes]:
        """Names of the full blocks that have none yet, in order."""
        named, full = len(request.block_hashes), request.num_tokens // self.block_size
        if full <= named:
            return []
        if not plain(request):
            return self.otherwise(request)
        data = array("i", request.all_token_ids[named * self.block_size : full * self.block_size]).tobytes()
        if named:
            return blocks_after(request.block_hashes[-1], data, self.block_size)
        key = request.cache_salt, data
        if key not in self.known:
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[key] = blocks_after(self.start(request.cache_salt), data, self.block_size)
        return list(self.known[key])
