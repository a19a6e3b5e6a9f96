"""Results that processes still work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """Call `result` once: it waits for the result, replaces processes that were lost, and returns it or raises."""

    result: Callable[[], T]
