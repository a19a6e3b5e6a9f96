"""Do something around the calls of one object's method: faults, waits and measurements at moments of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def surround(owner: object, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of `owner`. `around`: called with the method and its arguments."""
    inner = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **more: around(inner, *arguments, **more))


def call_before(owner: object, name: str, do: Callable[[], object]) -> None:
    def around(inner: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        do()
        return inner(*arguments, **more)

    surround(owner, name, around)


def call_after(owner: object, name: str, do: Callable[[], object]) -> None:
    def around(inner: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        found = inner(*arguments, **more)
        do()
        return found

    surround(owner, name, around)
