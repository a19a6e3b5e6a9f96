"""The actor to which ranks report. It has its own module, so that its process imports little."""

from __future__ import annotations

from typing import Any

INBOX = "the actor that the ranks report to"


class Inbox:
    """Messages of the ranks to the driver, and the driver's request to stop. A Ray actor on the driver's node."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Any]] = []
        self.stops = False

    def post(self, kind: str, content: Any) -> bool:
        """Add a message, and return whether the ranks should stop."""
        self.items.append((kind, content))
        return self.stops

    def take(self) -> list[tuple[str, Any]]:
        items, self.items = self.items, []
        return items

    def stop(self) -> None:
        self.stops = True
