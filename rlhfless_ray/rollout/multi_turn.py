"""A rollout of agents: every turn of the policy is a request of its own, and the next one comes when the agent has answered.

An episode's turns go to the engine that had the last one, whose cache holds the context; where that engine is gone they go to the
one with the least to do. A turn's tokens depend on the sample's seed, the turn's number and the context only.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfless_ray.agent.agent_processes import AgentProcesses
from rlhfless_ray.agent.engine_api import Reply
from rlhfless_ray.agent.messages import EpisodeEnd, EpisodeStart, TurnReply, TurnRequest
from rlhfless_ray.rollout.driver import OUTLIVES, RolloutDriver, step_s
from rlhfless_ray.rollout.growable_array import GrowableArray
from rlhfless_ray.types import Request


class MultiTurnRollout(RolloutDriver):
    """`expected` of the base class is by request here, and grows; `tokens` (n,) is the forecast of each episode."""

    def __init__(
        self, agents: AgentProcesses, labels: list[tuple[str, Any]], requests: list[Request], expected: np.ndarray, **more: Any
    ) -> None:
        """`labels`: prompt and label of each episode; `requests`: its key, its seed and how it is sampled; the
        rest follows from the turn. Keys are 0 … n - 1 in this order. `more`: as of the base class; nothing is moved."""
        super().__init__(requests=[], expected=np.zeros(0), **{**more, "migration": None})
        self.agents, self.asked = agents, requests
        self.openings = [
            EpisodeStart(one.key, prompt, label, one.temperature, one.top_p, one.min_tokens)
            for one, (prompt, label) in zip(requests, labels, strict=True)
        ]
        self.tokens, self.turns = expected, GrowableArray(np.zeros(0))
        self.written = np.zeros(len(requests), np.int64)
        self.over = np.zeros(len(requests), bool)
        self.home = np.full(len(requests), -1)  # engines by number
        self.waiting: dict[int, tuple[int, TurnRequest]] = {}  # by request: the call that asked, and what

    # ---- where the work comes from ----------------------------------------------------------------------------

    def begin(self, number: int, share: np.ndarray) -> None:
        self.home[share] = number

    def open(self) -> None:
        self.agents.begin(self.openings)

    @property
    def goes_on(self) -> bool:
        return not self.over.all()

    def sources(self) -> list[Any]:
        return self.agents.refs()

    def hear_source(self, ready: Any) -> None:
        for epoch, event in self.agents.collect(ready):
            self.heard(epoch, event)

    def listen(self) -> None:
        super().listen()
        for epoch, event in self.agents.replace_silent():
            self.heard(epoch, event)

    @property
    def awaited(self) -> str:
        turns = f"{len(self.waiting)} turns of the policy under way"
        return f"{int((~self.over).sum())} of {len(self.asked)} episodes ({turns})"

    @property
    def progress(self) -> tuple[int, int]:
        return int(self.over.sum()), len(self.asked)

    # ---- turns ------------------------------------------------------------------------------------------------

    def heard(self, epoch: int, event: TurnRequest | EpisodeEnd) -> None:
        if isinstance(event, EpisodeEnd):
            self.over[event.key] = True
            if self.listener is not None:
                self.listener.heard([event])
            for number in range(len(self.launches.engines)):  # with episodes ending, engines run out of what may come
                self.idle(number)
            return
        sample = self.asked[event.key]
        i = self.token_log.add(
            replace(  # what else a request says of sampling is the sample's
                sample,
                key=len(self.token_log.requests),
                token_ids=event.token_ids,
                seed=turn_seed(sample.seed, event.turn),
                max_tokens=event.max_tokens,
                awaited=True,
                stop=event.stop,
                stop_token_ids=event.stop_token_ids,
                min_tokens=event.min_tokens,
            )
        )
        left = max(1.0, float(self.tokens[event.key] - self.written[event.key]))
        self.turns.append(min(left, event.max_tokens))
        self.expected = self.moving.expected = self.turns.values
        self.waiting[i] = epoch, event
        self.launches.send(self.engine_of(event.key), np.array([i]))

    def engine_of(self, key: int) -> int:
        """Where an episode's next turn goes."""
        working = [self.launches.number(instance) for instance in self.pool.working]
        stay = [number for number in working if self.launches.engines[number].slot.node not in self.going] or working
        if self.home[key] not in stay:
            living = [number for number in self.launches.living() if number in stay] or stay
            held = {number: int(((self.home == number) & ~self.over).sum()) for number in living}
            self.home[key] = min(living, key=lambda number: (held[number], number))
        return int(self.home[key])

    def done(self, indices: list[int]) -> None:
        """Turns of the policy are complete: on to the agents."""
        told: dict[int, list[tuple[tuple[int, ...], TurnReply]]] = {}
        for i in indices:
            epoch, event = self.waiting.pop(i)
            found = self.token_log.completion(i)
            self.written[event.key] += len(found.token_ids)
            reply = Reply(found.token_ids.tolist(), "", found.logprobs.tolist(), found.finish_reason)
            told.setdefault(epoch, []).append((event.token_ids, TurnReply(event.key, event.turn, reply)))
        for epoch, answers in told.items():
            self.agents.answer(epoch, answers)

    # ---- engines ----------------------------------------------------------------------------------------------

    def idle(self, number: int) -> None:
        if not ((self.home == number) & ~self.over).any():
            super().idle(number)

    def tail_s(self) -> float:
        left = np.maximum(self.tokens, OUTLIVES * self.written) - self.written
        return float(left[~self.over].max(initial=0.0)) * step_s(self.stream.steps)


def turn_seed(seed: int, turn: int) -> int:
    """Of a sample's turn, counted from 0. The first one has the sample's: played to its end at once it is a sample without an
    agent."""
    if not turn:
        return seed
    return int.from_bytes(hashlib.blake2b(struct.pack("<Qq", seed, turn), digest_size=8).digest(), "little")
