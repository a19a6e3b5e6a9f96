"""Messages between the driver and agent processes. An episode is identified by its sample's key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.episode import Episode

Drawn = tuple[tuple[tuple[int, ...], PolicyReply, int], ...]  # context, reply and weight version of each turn of the policy


@dataclass(frozen=True)
class EpisodeStart:
    """Start an episode. `earlier_replies`: (context, reply) pairs of an attempt that did not end; they are reused."""

    key: int
    prompt: str
    label: Any
    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()  # of a policy turn, unless the agent requests others
    min_tokens: int = 0  # of a policy turn, unless the agent requests another number
    earlier_replies: tuple[tuple[tuple[int, ...], PolicyReply], ...] = ()


@dataclass(frozen=True)
class TurnRequest:
    """The agent requests policy turn number `turn`, counted from 0, of at most `max_tokens` tokens."""

    key: int
    turn: int
    token_ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # the turn does not stop before this many tokens


@dataclass(frozen=True)
class EpisodeEnd:
    """A finished episode: the result or an error message.

    `texts`: ("policy" or "agent", text) of its parts after the first observation, whose text is `observation`.
    """

    key: int
    result: Episode | str
    observation: str = ""
    texts: tuple[tuple[str, str], ...] = ()
    agent_s: float = 0.0  # time of the agent, without the policy's turns
    drawn: Drawn = ()  # added by the driver


@dataclass(frozen=True)
class AgentHung:
    """An agent blocks the process for `seconds`. `key`: its episode, if known."""

    key: int | None
    seconds: float


@dataclass(frozen=True)
class CpuTime:
    """CPU time of the process and of its finished children since it started."""

    cpu_s: float


@dataclass(frozen=True)
class TurnReply:
    """A policy turn for the agent that requested it."""

    key: int
    turn: int
    reply: PolicyReply


@dataclass
class EpisodePort:
    """An episode's state in the agent process. `agent_since_s`: start of the agent's turn, or None in the policy's."""

    start: EpisodeStart
    out: Any  # queue of the call's events
    playing: Any = None  # future of the episode
    task: Any = None  # in which it is played
    turns: int = 0
    agent_since_s: float | None = None
    agent_s: float = 0.0
    is_over: bool = False  # a server that an agent started may still send requests
    waiting: dict[int, Any] = field(default_factory=dict)  # turn → future of the reply
    replies: list[tuple[tuple[int, ...], PolicyReply]] = field(default_factory=list)
