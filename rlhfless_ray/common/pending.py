"""Results that processes still work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A result that processes still compute.

    Attributes:
        result: waits, replaces lost processes, and returns or raises. Further calls return the same value at once.
        is_ready: returns whether all processes have replied, or one was lost. `result` then returns soon, or replaces them.
        has_failed: returns whether one of them raised or was lost. Replaces nothing. If it is ready and has not
            failed, `result` needs no leases.
        refs: references that a caller can wait for, for several results at once.
    """

    result: Callable[[], T]
    is_ready: Callable[[], bool] = lambda: True
    has_failed: Callable[[], bool] = lambda: False
    refs: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "result", cache(self.result))
