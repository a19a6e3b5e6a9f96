"""Divide pages among the members of an engine of several slots, and join their parts. Pure.

Each member holds the KV of its heads. A page of a wide engine has the bytes that a page of an engine of one slot has, so engines of
different widths use each other's pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LayerPart:
    """A member's part of a block of one layer. `outer`: product of the dimensions before the heads. `inner_bytes`: bytes of the member's
    heads and the dimensions after them."""

    outer: int
    inner_bytes: int

    @property
    def bytes(self) -> int:
        return self.outer * self.inner_bytes


@dataclass(frozen=True)
class PageParts:
    """How a page is divided: `layers` in their order, among `width` members."""

    layers: tuple[LayerPart, ...]
    width: int

    @property
    def page_bytes(self) -> int:
        return self.width * sum(layer.bytes for layer in self.layers)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return whole pages (pages, page_bytes) uint8. `parts`: (pages, page_bytes / width) uint8 of each member, in their order."""
        if self.width == 1:
            return parts[0]
        pages = np.empty((len(parts[0]), self.page_bytes), np.uint8)
        at = 0
        for layer in self.layers:
            whole = self._whole(pages, at, layer)
            for rank, part in enumerate(parts):
                whole[:, :, rank] = part[:, at : at + layer.bytes].reshape(-1, layer.outer, layer.inner_bytes)
            at += layer.bytes
        return pages

    def of_layer(self, page: np.ndarray, number: int, rank: int) -> np.ndarray:
        """Return a member's part (bytes,) of layer `number` of a whole page (page_bytes,), a view if there is one member."""
        at, layer = sum(one.bytes for one in self.layers[:number]), self.layers[number]
        return self._whole(page[None], at, layer)[0, :, rank].reshape(-1)

    def _whole(self, pages: np.ndarray, at: int, layer: LayerPart) -> np.ndarray:
        """Return a layer's bytes of whole pages as a view (pages, outer, width, inner_bytes). `at`: where a member's part begins."""
        begin = self.width * at
        return pages[:, begin : begin + self.width * layer.bytes].reshape(len(pages), layer.outer, self.width, layer.inner_bytes)
