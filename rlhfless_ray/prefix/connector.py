"""The KV connector that vLLM loads by path: pages of a store in this process go into its cache, and out of it.

The store is filled before generation, so nothing here waits for anybody. Loads are synchronous: the pages of the requests that
a step admits are copied in before its forward pass. Saves happen when a request ends or is cut, from blocks that are still its
own; engine and worker are one process here (executor `uni`, no overlapping steps), so that is a copy, not a protocol.

Names of vLLM used here, the same from 0.24 to 0.32: `KVConnectorBase_V1` and its abstract methods, `KVConnectorMetadata`,
`register_kv_caches`, `request_finished`; of a request `all_token_ids`, `num_computed_tokens`, `block_hashes`, `cache_salt`,
`sampling_params.extra_args`, where the engine puts the request's name and how much of it was said before; `blocks.get_block_ids()`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from rlhfless_ray.prefix.address import chain
from rlhfless_ray.prefix.hasher import plain
from rlhfless_ray.prefix.pages import Kind, PageStore

PLAIN = ("FullAttentionSpec", "MLAAttentionSpec")
VOLATILE = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")  # no part of what is computed


def transfer_config(store: PageStore) -> Any:
    """The `kv_transfer_config` of an engine that loads from and saves into `store`."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="PageConnector", kv_connector_module_path=__name__, kv_role="kv_both",
        kv_connector_extra_config={"store": store}, kv_load_failure_policy="recompute",
    )


@dataclass
class Loads(KVConnectorMetadata):
    """What a step copies in before its forward pass."""

    blocks: list[int] = field(default_factory=list)
    pages: list[np.ndarray] = field(default_factory=list)  # held here, so that emptying the store does not matter


class PageConnector(KVConnectorBase_V1):
    """vLLM builds two: one for its scheduler, one for its worker. Both see the same store."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.store: PageStore = vllm_config.kv_transfer_config.kv_connector_extra_config["store"]
        self.block_size = vllm_config.cache_config.block_size
        self.config, self.cache = vllm_config, kv_cache_config
        self.store.refused = self.store.refused or _unsupported(vllm_config, kv_cache_config)
        self.found: dict[str, tuple[int, list[np.ndarray]]] = {}  # of requests being admitted: first block, pages
        self.loads = Loads()
        self.layers: list[_Layer] = []

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a page that was not saved is computed again: nothing waits for it

    # ---- the scheduler's side --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens whose pages are in the store beyond those that the engine's own cache has. All but the prompt's last token,
        so the number may end inside a block: that block is the request's own, and is filled up by what it computes."""
        matched = self._match(request, num_computed_tokens)
        asked = request.sampling_params.extra_args
        if asked.get("offset"):
            self.store.computed[asked["name"]] = request.num_tokens - num_computed_tokens - matched
        return matched, False

    def _match(self, request: Any, num_computed_tokens: int) -> int:
        self.found.pop(request.request_id, None)
        if not self.store.rows or not plain(request):
            return 0
        tokens = request.num_tokens - 1
        first = num_computed_tokens // self.block_size
        pages = self.store.match(self._addresses(request, tokens), first)
        if not pages:
            return 0
        self.found[request.request_id] = first, pages
        return min(tokens, (first + len(pages)) * self.block_size) - num_computed_tokens

    def _addresses(self, request: Any, tokens: int) -> list[bytes]:
        """Of the pages of its first so many tokens: vLLM has them as names of the full blocks (`BlockHasher`), the last one, of a
        block that is partly filled, is not among those."""
        full = tokens // self.block_size
        found: list[bytes] = request.block_hashes[:full]
        if rest := request.all_token_ids[full * self.block_size : tokens]:
            found += chain(found[-1] if found else self.store.made.start(request.cache_salt), rest, self.block_size)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first, pages = self.found.pop(request.request_id, (0, []))
        if num_external_tokens <= 0:
            return
        pages = pages[: -(-num_external_tokens // self.block_size)]
        self.loads.blocks += blocks.get_block_ids()[0][first : first + len(pages)]
        self.loads.pages += pages
        self.store.counts["loaded_tokens"] += num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        self.store.counts["computed_tokens"] += scheduler_output.total_num_scheduled_tokens
        loads, self.loads = self.loads, Loads()
        return loads

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks are its own until this returns: the moment to copy out what was asked for."""
        name = request.sampling_params.extra_args.get("name")
        if name in self.store.asked and not self.store.refused and plain(request):
            start = time.perf_counter()
            addresses = self._addresses(request, min(request.num_computed_tokens, request.num_tokens - 1))
            self.store.save(name, addresses, block_ids)
            self.store.seconds["save"] += time.perf_counter() - start
        return False, None

    # ---- the worker's side -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers = []
        if self.store.refused:
            return
        seen: set[int] = set()
        for name, cache in kv_caches.items():
            if cache.data_ptr() in seen:  # layers that share one cache
                continue
            seen.add(cache.data_ptr())
            if self.cache.num_blocks not in cache.shape[:2]:
                self.store.refused = f"the KV cache of {name} has shape {tuple(cache.shape)}, not one entry for each of its blocks"
                return
            self.layers.append(_Layer(name, cache, cache.shape.index(self.cache.num_blocks)))
        said = [_model(self.config), *(layer.description() for layer in self.layers)]
        fingerprint = hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16).digest()
        self.store.kind = Kind(fingerprint, self.block_size, sum(layer.bytes for layer in self.layers))
        self.store.copy_out = self._copy_out

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        if not loads.blocks:
            return
        start = time.perf_counter()
        at = 0
        for layer in self.layers:
            layer.write(loads.blocks, [page[at : at + layer.bytes] for page in loads.pages])
            at += layer.bytes
        self.store.counts["loaded"] += len(loads.blocks)
        self.store.seconds["load"] += time.perf_counter() - start

    def _copy_out(self, blocks: Sequence[int]) -> np.ndarray:
        pages = np.empty((len(blocks), sum(layer.bytes for layer in self.layers)), np.uint8)
        at = 0
        for layer in self.layers:
            layer.read(blocks, pages[:, at : at + layer.bytes])
            at += layer.bytes
        return pages

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **options: Any) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """Nothing is being saved."""


class _Layer:
    """One layer's cache and which of its dimensions counts blocks."""

    def __init__(self, name: str, cache: torch.Tensor, dim: int) -> None:
        self.name, self.cache, self.dim = name, cache, dim
        self.shape = tuple(size for d, size in enumerate(cache.shape) if d != dim)  # of one block
        self.bytes = int(np.prod(self.shape)) * cache.element_size()
        by_block = cache.movedim(dim, 0)
        # in the host's memory and in one piece a block is copied as what it is, without a call of torch's for it
        self.rows = by_block.flatten(1).view(torch.uint8).numpy() if cache.device.type == "cpu" and by_block.is_contiguous() else None

    def description(self) -> list[Any]:
        order = sorted(range(self.cache.dim()), key=lambda d: -self.cache.stride()[d])
        return [self.name, self.shape, self.dim, order, str(self.cache.dtype)]

    def read(self, blocks: Sequence[int], into: np.ndarray) -> None:
        """Into (blocks, bytes) uint8 in host memory."""
        if self.rows is not None:
            for row, block in zip(into, blocks, strict=True):
                row[:] = self.rows[block]
            return
        index = torch.tensor(blocks, dtype=torch.long, device=self.cache.device)
        taken = self.cache.index_select(self.dim, index).movedim(self.dim, 0).contiguous()
        into[:] = taken.reshape(len(blocks), -1).view(torch.uint8).cpu().numpy()

    def write(self, blocks: Sequence[int], pages: Sequence[np.ndarray]) -> None:
        if self.rows is not None:
            for block, page in zip(blocks, pages, strict=True):
                self.rows[block] = page
            return
        index = torch.tensor(blocks, dtype=torch.long, device=self.cache.device)
        values = torch.from_numpy(np.stack(pages)).to(self.cache.device).view(self.cache.dtype).reshape(len(blocks), *self.shape)
        self.cache.movedim(self.dim, 0)[index] = values


def _model(config: Any) -> list[Any]:
    """What makes bytes of KV mean the same: model, number types, the code that writes them."""
    model = config.model_config
    described = {key: value for key, value in model.hf_config.to_dict().items() if key not in VOLATILE}
    backends = sorted(
        {layer.get_attn_backend().get_name() for layer in config.compilation_config.static_forward_context.values()
         if hasattr(layer, "get_attn_backend")}
    )  # fmt: skip
    return [
        vllm.__version__, described, str(model.dtype), str(model.quantization), config.cache_config.block_size,
        str(config.cache_config.cache_dtype), backends,
    ]


def _unsupported(config: Any, cache: Any) -> str:
    """Why this engine's KV cannot be kept as pages, empty where it can."""
    if config.parallel_config.world_size > 1:
        return f"the engine runs on {config.parallel_config.world_size} devices, which hold a part of each page each"
    if config.scheduler_config.async_scheduling:
        return "the engine's steps overlap (async_scheduling)"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "the engine scales its KV by what it has seen (calculate_kv_scales)"
    if cache is None or len(cache.kv_cache_groups) != 1:
        return f"its layers form {len(cache.kv_cache_groups) if cache else 0} KV groups, not one"
    spec = cache.kv_cache_groups[0].kv_cache_spec
    specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    for one in specs:
        if type(one).__name__ not in PLAIN or getattr(one, "sliding_window", None) or getattr(one, "attention_chunk_size", None):
            return f"its layers' KV is of kind {type(one).__name__}, not of plain full attention"
    return ""
