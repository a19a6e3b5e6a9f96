"""Orders to an engine at work. Another thread of its process puts them in; the engine looks between two steps."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from rlhfless_ray.types import Request


@dataclass(frozen=True)
class EngineCommand:
    """cut: keys of requests to stop, whose last tokens are then told with end "cut"; add: requests to take up. `what` names it
    in the timeline. ticket: not 0 to keep the KV pages of what is cut, to be handed over against it; pages: references to such
    pages of what is added."""

    cut: tuple[int, ...] = ()
    add: tuple[Request, ...] = ()
    what: str = ""
    ticket: int = 0
    pages: tuple[Any, ...] = ()


class ControlQueue:
    """Open for one epoch, the number of one call of the engine, at a time. An order for another one comes too late (or too
    early) and is nobody's: whoever sent it sees from the end of that call what has not been done."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.epoch: int | None = None
        self.orders: list[EngineCommand] = []

    def open(self, epoch: int) -> None:
        with self.changed:
            self.epoch, self.orders = epoch, []

    def tell(self, epoch: int, order: EngineCommand) -> bool:
        """Whether the order will be looked at."""
        with self.changed:
            if epoch != self.epoch:
                return False
            self.orders.append(order)
            self.changed.notify()
            return True

    def take(self) -> list[EngineCommand]:
        if not self.orders:  # without the lock: this is asked before every step, and what comes now is seen at the next
            return []
        with self.changed:
            orders, self.orders = self.orders, []
            return orders

    def wait(self, seconds: float) -> None:
        """Until an order is there or the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.orders), max(0.0, seconds))

    def close_if_empty(self) -> bool:
        """The engine has nothing to do: unless an order came in this moment, no more are taken."""
        with self.changed:
            if not self.orders:
                self.epoch = None
            return self.epoch is None

    def close(self) -> None:
        with self.changed:
            self.epoch, self.orders = None, []
