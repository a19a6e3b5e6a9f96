"""Blocks of KV in and out of a cache as devices lay it out: whatever its order in memory, a block is the same bytes, and only it moves."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.engine  # the module imports vLLM

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 7, 2, 16, 8, 3


@pytest.fixture(scope="module")
def connector() -> ModuleType:
    from rlhfless_ray.engine.prepare_vllm import prepare

    prepare()
    import rlhfless_ray.prefix.connector as connector

    return connector


def values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def caches(layout: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """A view for each layer and which of its dimensions counts blocks; in vLLM's letters: L(ayers), B(locks), H(eads), N (tokens),
    C(ontent: keys and values)."""
    size = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * WIDTH}
    if layout == "2BNHC":  # as FlashAttention had it before: keys of all blocks, then values of all blocks
        return [values(2, BLOCKS, TOKENS, HEADS, WIDTH, dtype=dtype)], 1
    whole = values(*(size[letter] for letter in layout), dtype=dtype)
    logical = whole.permute(*(layout.index(letter) for letter in "LBHNC"))
    return list(logical), 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLNHC", "BLHNC", "LHBNC", "2BNHC"])
def test_a_block_is_read_and_written_unchanged(connector: ModuleType, layout: str, dtype: torch.dtype) -> None:
    views, dim = caches(layout, dtype)
    before = [view.clone() for view in views]
    layer = connector._Layer("layer", views[0], dim)
    assert (layer.rows is not None) == (layout == "LBHNC")  # in one piece, as on CPU: copied without torch
    pages = np.zeros((2, layer.bytes), np.uint8)
    layer.read([5, 2], pages)
    blocks = before[0].movedim(dim, 0)
    for page, block in zip(pages, (5, 2), strict=True):
        assert page.tobytes() == blocks[block].contiguous().flatten().view(torch.uint8).numpy().tobytes()
    layer.write([0, 6], list(pages))
    now = views[0].movedim(dim, 0)
    assert torch.equal(now[0], blocks[5]) and torch.equal(now[6], blocks[2])
    assert torch.equal(now[1:6], blocks[1:6]), "a block that was not asked for"
    assert all(torch.equal(view, old) for view, old in zip(views[1:], before[1:], strict=True)), "another layer's"
