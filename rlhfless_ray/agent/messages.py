"""What the driver and a process of agents tell each other. An episode is known by its sample's key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhfless_ray.agent.engine import Reply
from rlhfless_ray.agent.episode import Episode


@dataclass(frozen=True)
class Opening:
    """An episode to be played. `said`: contexts and replies of an earlier attempt, whose process died: they stand."""

    key: int
    prompt: str
    label: Any
    temperature: float
    top_p: float = 1.0
    said: tuple[tuple[tuple[int, ...], Reply], ...] = ()


@dataclass(frozen=True)
class Asked:
    """The agent wants the policy's next turn, its number `turn` counted from 0. `max_tokens`: the longest it may be."""

    key: int
    turn: int
    token_ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Played:
    """An episode is over: the episode, or what went wrong. texts: of its pieces, in turn the policy's and the agent's; observation:
    the first one's."""

    key: int
    result: Episode | str
    observation: str = ""
    texts: tuple[tuple[str, str], ...] = ()
    agent_s: float = 0.0  # that the agent took, and not the policy


@dataclass(frozen=True)
class Stuck:
    """The process can go on with nothing: an agent holds it. `key`: the episode it was at, where that is known."""

    key: int | None
    seconds: float


@dataclass(frozen=True)
class Worked:
    """For how long the process has been at work on a processor since it began, what it started and waited for with it."""

    core_s: float


@dataclass(frozen=True)
class Answered:
    """The policy's turn, to who asked for it."""

    key: int
    turn: int
    reply: Reply


@dataclass
class Hand:
    """An episode in a process: how often it asked, and since when the agent has it (None: the policy has)."""

    opening: Opening
    turns: int = 0
    since_s: float | None = None
    agent_s: float = 0.0
    over: bool = False  # it may be asked for in its name all the same, by a server that an agent started
    waiting: dict[int, Any] = field(default_factory=dict)  # turn → future of the reply
    replies: list[tuple[tuple[int, ...], Reply]] = field(default_factory=list)
