"""An array that grows at its end."""

from __future__ import annotations

from typing import Any

import numpy as np


class GrowableArray:
    """`values` (n,) is a view of a buffer that doubles when it is full, so that n values appended one by one are copied fewer than
    2 n times in all. A view taken before an append does not have what was appended, and writes to one may be lost after it."""

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
