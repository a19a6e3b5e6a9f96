"""Results that processes still work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A result that processes still compute. Call `result` once: it waits, replaces lost processes, and returns or raises.

    `is_ready`: returns whether the processes have replied or were lost. `result` then returns soon, or replaces them.
    """

    result: Callable[[], T]
    is_ready: Callable[[], bool] = lambda: True
