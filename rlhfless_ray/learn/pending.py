"""Results that processes still work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """Call `result` once: it waits for the result, replaces processes that were lost, and returns it or raises.

    `is_ready`: whether the processes have answered, or were lost. `result` then returns soon, or replaces them.
    """

    result: Callable[[], T]
    is_ready: Callable[[], bool] = lambda: True
