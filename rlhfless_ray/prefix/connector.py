"""The KV connector, which vLLM loads by path. It copies pages between a store in this process and vLLM's cache.

The store is filled before generation, so nothing here waits. Loads are synchronous: pages of the requests that a step admits are
copied in before its forward pass. Saves happen when a request ends or is cut, while its blocks are still its own. Engine and
worker are one process (no overlapping steps), so both are plain copies. Further members of an engine get whole pages with each step's
metadata and take their parts of them; the engine's process calls them to read theirs (`read_part`).

Names of vLLM used here, the same from 0.24 to 0.32: `KVConnectorBase_V1` and its abstract methods, `KVConnectorMetadata`,
`register_kv_caches`, `request_finished`, `blocks.get_block_ids()`; of a request `all_token_ids`, `num_computed_tokens`,
`block_hashes`, `cache_salt`, and `sampling_params.extra_args`, which hold the request's name and the length of its earlier part.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prefix.block_hash import chain
from rlhfless_ray.prefix.block_hasher import is_identified_by_tokens
from rlhfless_ray.prefix.page_parts import LayerPart, PageParts
from rlhfless_ray.prefix.pages import PageLayout, PageStore

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

FULL_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
IGNORED_CONFIG_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")  # without influence on the KV


def transfer_config(store: PageStore) -> KVTransferConfig:
    """Return the `kv_transfer_config` of an engine that loads from and saves into `store`."""
    return KVTransferConfig(
        kv_connector="PageConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_connector_extra_config={"store": store},
        kv_load_failure_policy="recompute",
    )


@dataclass
class PageLoads(KVConnectorMetadata):
    """Pages that a step copies in before its forward pass."""

    blocks: list[int] = field(default_factory=list)
    pages: list[np.ndarray] = field(default_factory=list)  # references that survive clearing the store


class PageConnector(KVConnectorBase_V1):
    """vLLM's connector. vLLM creates one for the scheduler and one for the worker; both use the same store."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.store: PageStore = vllm_config.kv_transfer_config.kv_connector_extra_config["store"]
        self.block_size = vllm_config.cache_config.block_size
        self.config, self.cache = vllm_config, kv_cache_config
        self.store.refused = self.store.refused or _unsupported_reason(vllm_config, kv_cache_config)
        self.matched: dict[str, tuple[int, list[np.ndarray]]] = {}  # requests being admitted → first block, pages
        self.loads = PageLoads()
        self.layers: list[_Layer] = []
        self.width, self.rank = vllm_config.parallel_config.tensor_parallel_size, 0

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a page that was not saved is computed again

    # ---- the scheduler's side --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens in the store beyond those in the engine's own cache.

        At most all but the prompt's last token, so the number may end inside a block. That block belongs to the request, which
        computes its rest.
        """
        matched = self._match(request, num_computed_tokens)
        extra = request.sampling_params.extra_args
        if extra.get("offset"):
            self.store.computed[extra["name"]] = request.num_tokens - num_computed_tokens - matched
        return matched, False

    def _match(self, request: Request, num_computed_tokens: int) -> int:
        self.matched.pop(request.request_id, None)
        if not self.store.rows or not is_identified_by_tokens(request):
            return 0
        tokens = request.num_tokens - 1
        first = num_computed_tokens // self.block_size
        pages = self.store.match(self._addresses(request, tokens), first)
        if not pages:
            return 0
        self.matched[request.request_id] = first, pages
        return min(tokens, (first + len(pages)) * self.block_size) - num_computed_tokens

    def _addresses(self, request: Request, tokens: int) -> list[bytes]:
        """Return the addresses of the pages of the first `tokens` tokens.

        vLLM has those of full blocks as block names (`BlockHasher`). The address of a partly filled last block is added.
        """
        full = tokens // self.block_size
        addresses: list[bytes] = request.block_hashes[:full]
        if rest := request.all_token_ids[full * self.block_size : tokens]:
            addresses += chain(addresses[-1] if addresses else self.store.layout.start(request.cache_salt), rest, self.block_size)
        return addresses

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        first, pages = self.matched.pop(request.request_id, (0, []))
        if num_external_tokens <= 0:
            return
        pages = pages[: -(-num_external_tokens // self.block_size)]
        self.loads.blocks += blocks.get_block_ids()[0][first : first + len(pages)]
        self.loads.pages += pages
        self.store.counts["loaded_tokens"] += num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PageLoads:
        self.store.counts["computed_tokens"] += scheduler_output.total_num_scheduled_tokens
        loads, self.loads = self.loads, PageLoads()
        return loads

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, JsonObject | None]:
        """Copy out requested pages. The request's blocks are its own until this returns."""
        name = request.sampling_params.extra_args.get("name")
        if name in self.store.to_save and not self.store.refused and is_identified_by_tokens(request):
            start = time.perf_counter()
            addresses = self._addresses(request, min(request.num_computed_tokens, request.num_tokens - 1))
            self.store.save(name, addresses, block_ids)
            self.store.seconds["save"] += time.perf_counter() - start
        return False, None

    def copy(self, request: Request, block_ids: Sequence[int]) -> dict[bytes, np.ndarray]:
        """Copy out the full pages of a running request between two steps."""
        name, full = request.sampling_params.extra_args["name"], request.num_computed_tokens // self.block_size
        if self.store.refused or not full or not is_identified_by_tokens(request):
            return {}
        return self.store.copy(name, request.block_hashes[:full], block_ids[:full])

    # ---- the worker's side -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers = []
        if self.store.refused or self.cache is None:  # which refuses too
            return
        heads = self.config.model_config.get_num_kv_heads(self.config.parallel_config) if self.width > 1 else 0
        seen: set[int] = set()
        for name, cache in kv_caches.items():
            if cache.data_ptr() in seen:  # layers that share one cache
                continue
            seen.add(cache.data_ptr())
            if self.cache.num_blocks not in cache.shape[:2]:
                self.store.refused = f"the KV cache of {name} has shape {tuple(cache.shape)}, not one entry for each of its blocks"
                return
            layer = _Layer(name, cache, cache.shape.index(self.cache.num_blocks), self.width, heads)
            if self.width > 1 and layer.heads_dim is None:
                self.store.refused = f"the KV cache of {name} has shape {tuple(cache.shape)}, in which its {heads} heads cannot be told"
                return
            self.layers.append(layer)
        if self.width > 1:
            self.rank = get_tensor_model_parallel_rank()
        self.parts = PageParts(tuple(layer.part for layer in self.layers), self.width)
        described = [_model_description(self.config), *(layer.description() for layer in self.layers)]
        fingerprint = hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode(), digest_size=16).digest()
        self.store.kind = PageLayout(fingerprint, self.block_size, self.parts.page_bytes)
        self.store.copy_out = self.read_part  # replaced in an engine of several members, see `join_parts`

    def start_load_kv(self, forward_context: ForwardContext, **options: object) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, PageLoads)
        if not loads.blocks:
            return
        start = time.perf_counter()
        for number, layer in enumerate(self.layers):
            layer.write(loads.blocks, [self.parts.of_layer(page, number, self.rank) for page in loads.pages])
        self.store.counts["loaded"] += len(loads.blocks)
        self.store.seconds["load"] += time.perf_counter() - start

    def read_part(self, blocks: Sequence[int]) -> np.ndarray:
        """Return this member's part of the pages in these blocks: (blocks, bytes) uint8."""
        part = np.empty((len(blocks), sum(layer.bytes for layer in self.layers)), np.uint8)
        at = 0
        for layer in self.layers:
            layer.read(blocks, part[:, at : at + layer.bytes])
            at += layer.bytes
        return part

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: all layers are loaded before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **options: object) -> None:
        """Nothing to do: pages are saved when a request ends."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: saving is synchronous."""


def join_parts(store: PageStore, call_members: Callable[..., list[np.ndarray]]) -> None:
    """Make the store of an engine of several members copy out whole pages. `call_members`: calls a function with each member's worker."""
    connector = get_kv_transfer_group()
    store.copy_out = lambda blocks: connector.parts.join(call_members(_read_part, list(blocks)))


def _read_part(worker: object, blocks: list[int]) -> np.ndarray:
    connector = get_kv_transfer_group()
    part: np.ndarray = connector.read_part(blocks)
    return part


class _Layer:
    """One layer's cache. `dim`: the dimension that counts blocks. `heads`: KV heads of each of `width` members, if there are several."""

    def __init__(self, name: str, cache: torch.Tensor, dim: int, width: int = 1, heads: int = 0) -> None:
        self.name, self.cache, self.dim, self.width = name, cache, dim, width
        self.shape = tuple(size for d, size in enumerate(cache.shape) if d != dim)  # of one block
        self.bytes = int(np.prod(self.shape)) * cache.element_size()
        self.heads_dim = _heads_dim(self.shape, heads) if width > 1 else None
        by_block = cache.movedim(dim, 0)
        # contiguous host memory is copied block by block with numpy, without a torch call
        self.rows = by_block.flatten(1).view(torch.uint8).numpy() if cache.device.type == "cpu" and by_block.is_contiguous() else None

    @property
    def part(self) -> LayerPart:
        outer = int(np.prod(self.shape[: self.heads_dim or 0]))
        return LayerPart(outer, self.bytes // outer)

    def description(self) -> list[object]:
        """Describe a block of all members, so that engines of different widths have the same description."""
        order = sorted(range(self.cache.dim()), key=lambda d: -self.cache.stride()[d])
        shape = tuple(size * self.width if d == self.heads_dim else size for d, size in enumerate(self.shape))
        return [self.name, shape, self.dim, order, str(self.cache.dtype)]

    def read(self, blocks: Sequence[int], into: np.ndarray) -> None:
        """Copy blocks into (blocks, bytes) uint8 in host memory."""
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


def _heads_dim(shape: Sequence[int], heads: int) -> int | None:
    """Return which dimension of a block counts heads, or None if that is unclear.

    vLLM's blocks are (heads, tokens, content) since 0.32. Before, backends had shapes of their own.
    """
    if len(shape) == 3 and shape[0] == heads:
        return 0
    found = [d for d, size in enumerate(shape) if size == heads]
    return found[0] if len(found) == 1 else None


def _model_description(config: VllmConfig) -> list[object]:
    """Describe everything that gives KV bytes their meaning: model, dtypes, and the code that writes them."""
    model = config.model_config
    described = {key: value for key, value in model.hf_config.to_dict().items() if key not in IGNORED_CONFIG_KEYS}
    backends = sorted(
        {layer.get_attn_backend().get_name() for layer in config.compilation_config.static_forward_context.values()
         if hasattr(layer, "get_attn_backend")}
    )  # fmt: skip
    return [
        vllm.__version__,
        described,
        str(model.dtype),
        str(model.quantization),
        config.cache_config.block_size,
        str(config.cache_config.cache_dtype),
        backends,
    ]


def _unsupported_reason(config: VllmConfig, cache: KVCacheConfig) -> str:
    """Return why this engine's KV cannot be stored as pages, or "" if it can."""
    width, heads = config.parallel_config.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    if width > 1 and (heads % width or config.model_config.use_mla):  # latent attention has no heads in its KV
        return f"the engine's {width} members do not divide its KV by heads"
    if cache is None or len(cache.kv_cache_groups) != 1:
        return f"its layers form {len(cache.kv_cache_groups) if cache else 0} KV groups, not one"
    spec = cache.kv_cache_groups[0].kv_cache_spec
    specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    for one in specs:
        if type(one).__name__ not in FULL_SPECS or getattr(one, "sliding_window", None) or getattr(one, "attention_chunk_size", None):
            return f"its layers' KV is of kind {type(one).__name__}, not of plain full attention"
    return ""
