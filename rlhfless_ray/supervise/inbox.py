"""The actor to which ranks report, and in which Ray Train's trainer waits for them.

Its module imports little, so its process answers at once. What Ray Train imports (torch, pandas) is shared there with the ranks, whose
processes are forked from the same one. The driver does without: 0.2 GB.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfless_ray.supervise.rank_start import RankStart

TRAINING = "training"  # concurrency group of `train`, which lasts as long as the ranks; other calls come one after the other


class Inbox:
    """Messages of the ranks to the driver, and the driver's request to stop. A Ray actor on the driver's node."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Any]] = []
        self.stops = False

    def train(
        self, start: RankStart, nodes: list[str], private: bool, has_dashboard: bool, variables: dict[str, str]
    ) -> BaseException | None:
        """Start the ranks and wait for their end. Returns what ended them, if they failed. See `RankRun`.

        `variables`: the driver's environment variables for Ray Train.
        """
        os.environ.update(variables)  # before it is imported
        from rlhfless_ray.supervise.rank_trainer import train_ranks

        return train_ranks(start, nodes, private, has_dashboard)

    def post(self, kind: str, content: object) -> bool:
        """Add a message, and return whether the ranks should stop."""
        self.items.append((kind, content))
        return self.stops

    def take(self) -> list[tuple[str, Any]]:
        items, self.items = self.items, []
        return items

    def stop(self) -> None:
        self.stops = True
