"""An array that grows at its end."""

from __future__ import annotations

from typing import Any

import numpy as np


class GrowableArray:
    """An array with amortised constant-time append: its buffer doubles when it is full.

    `values` (n,) is a view of the buffer. After an append, older views lack the new value, and writes to them may be lost.
    """

    def __init__(self, values: np.ndarray) -> None:
        self._buffer, self._used = values.copy(), len(values)

    @property
    def values(self) -> np.ndarray:
        return self._buffer[: self._used]

    def append(self, value: Any) -> None:
        if self._used == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(max(16, self._used), self._buffer.dtype)])
        self._buffer[self._used] = value
        self._used += 1
