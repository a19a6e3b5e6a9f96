"""Commands to a working engine. Another thread of its process adds them, and the engine reads them between two steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.types import Request

_tickets = itertools.count(1)


def new_ticket() -> int:
    """Return a number that no KV pages were kept under yet."""
    return next(_tickets)


@dataclass(frozen=True)
class DraftNews:
    """Data for an engine's drafts.

    Attributes:
        learned: state of `Learned`; {} if there is nothing new.
        texts: (name, tokens) of responses of other engines and earlier steps. Tokens of a name that was sent before continue that text.
        weights: the drafter's weights, {name: array} or a reference to it; None if the engine has them.
        lengths: (draws,) joint draws of the lengths of responses in tokens, by their requests' keys.
    """

    learned: JsonObject
    texts: tuple[tuple[int, np.ndarray], ...]
    weights: Any = None
    lengths: Mapping[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineCommand:
    """A command to cut requests, to add some, or both.

    Attributes:
        cut: keys of requests to stop. Their last tokens are sent with end "cut".
        copy: keys of requests that continue, and whose full KV blocks are copied.
        what: name in the timeline.
        ticket: if not 0, the engine keeps the KV pages of cut or copied requests under this number until they are fetched.
        after_copy: whether the pages of cut requests that were copied before are left out, because they have arrived.
        pages: references to the KV pages of added requests.
        drafts: see `DraftNews`.
    """

    cut: tuple[int, ...] = ()
    copy: tuple[int, ...] = ()
    add: tuple[Request, ...] = ()
    what: str = ""
    ticket: int = 0
    after_copy: bool = False
    pages: tuple[Any, ...] = ()
    drafts: DraftNews | None = None


class ControlQueue:
    """The commands of an engine's current call, which is identified by its epoch.

    Commands for other epochs are dropped. At the end of that call their sender sees which commands were not carried out.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.epoch: int | None = None
        self.commands: list[EngineCommand] = []

    def open(self, epoch: int) -> None:
        with self.lock:
            self.epoch, self.commands = epoch, []

    def put(self, epoch: int, command: EngineCommand) -> bool:
        """Add a command. Returns False if its call is over or has not begun."""
        with self.lock:
            if epoch != self.epoch:
                return False
            self.commands.append(command)
            self.lock.notify_all()
            return True

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a command, at most `timeout_s` seconds."""
        with self.lock:
            self.lock.wait_for(lambda: self.commands, max(0.0, timeout_s))

    def take(self) -> list[EngineCommand]:
        if not self.commands:  # without the lock: this runs before every step, and a new command can wait for the next step
            return []
        with self.lock:
            commands, self.commands = self.commands, []
            return commands

    def close_if_empty(self) -> bool:
        """Close the queue unless a command has just arrived. Returns whether it is closed."""
        with self.lock:
            if not self.commands:
                self.epoch = None
            return self.epoch is None

    def close(self) -> None:
        with self.lock:
            self.epoch, self.commands = None, []
