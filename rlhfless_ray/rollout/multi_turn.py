"""Roll out agents' episodes: each turn of the policy is a request, which the agent's last feedback leads to.

An episode's turns go to the engine of its last turn, whose cache holds the context. If that engine is gone, they go to the engine
with the fewest episodes. A turn's tokens depend only on the sample's seed, the turn's number and the context.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfless_ray.agent.agent_processes import AgentProcesses
from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.messages import Drawn, EpisodeEnd, EpisodeStart, TurnReply, TurnRequest
from rlhfless_ray.agent.unfinished_episode import replies_of, unfinished_episode, versions_of_turns
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.driver import OUTLIVES, RolloutDriver, median_step_s
from rlhfless_ray.rollout.growable_array import GrowableArray
from rlhfless_ray.types import UNFINISHED, Completion, Request, WeightVersion


class MultiTurnRollout(RolloutDriver):
    """A rollout of episodes. The base class's `expected` is per turn, and grows. `tokens` (n,) is the forecast of each episode."""

    def __init__(
        self,
        agents: AgentProcesses,
        labels: list[tuple[str, Any]],
        pool: WorkerPool,
        requests: list[Request],
        expected: np.ndarray,
        weights: WeightVersion,
        **options: Any,
    ) -> None:
        """Create a rollout. Turns are never moved.

        Args:
            labels: prompt and label of each episode.
            requests: the episodes' keys 0 … n - 1, seeds and sampling parameters. Each turn determines the rest.
            options: keyword arguments of the base class.
        """
        super().__init__(pool, [], np.zeros(0), weights, **{**options, "migration": None})
        before = super().logged_before()
        self.agents, self.episodes = agents, requests
        self.ended_keys = [key for key, completion in before.items() if completion.finish_reason != UNFINISHED]
        self.is_over = np.zeros(len(requests), bool)
        self.is_over[self.ended_keys] = True
        earlier = {key: replies_of(completion) for key, completion in before.items()}
        self.openings = [
            EpisodeStart(
                request.key,
                prompt,
                label,
                request.temperature,
                request.top_p,
                request.top_k,
                request.stop,
                request.min_tokens,
                earlier.get(request.key, ()),
            )
            for request, (prompt, label) in zip(requests, labels, strict=True)
            if not self.is_over[request.key]
        ]
        agents.take_over(self.openings)  # now, because a rollout with enough complete groups ends before its episodes begin
        self.versions = {key: list(versions_of_turns(completion)) for key, completion in before.items()}  # of the turns so far, by key
        self.tokens, self.turns = expected, GrowableArray(np.zeros(0))
        self.written = np.zeros(len(requests), np.int64)
        for key, completion in before.items():
            self.written[key] = len(completion.token_ids)
        self.home = np.full(len(requests), -1)  # number of each episode's engine
        self.waiting: dict[int, tuple[int, TurnRequest]] = {}  # by request: the agent call's epoch, and the turn it requested

    def logged_before(self) -> Mapping[int, Completion]:
        return {}  # the log holds turns, and none has begun

    # ---- sources of requests --------------------------------------------------------------------------------------

    def assign(self, number: int, share: np.ndarray) -> None:
        self.home[share] = number

    def start_sources(self) -> None:
        self.agents.begin(self.openings)

    def stop_sources(self) -> None:
        self.agents.abandon()

    def unfinished(self) -> list[Completion]:
        """Return the finished turns of the unfinished episodes. A cut turn begins again in the next step."""
        self.result.cut_tokens = int(self.token_log.length[~self.token_log.finished].sum())
        return [unfinished_episode(key, self.drawn_by(key), self.weights.version) for key in np.flatnonzero(~self.is_over).tolist()]

    def drawn_by(self, key: int) -> Drawn:
        """Return an episode's turns of the policy with their versions. Turns of this rollout have the newest version."""
        before = self.versions.get(key, [])
        replies = self.agents.replies[key]
        versions = [*before, *[self.weights.version] * (len(replies) - len(before))]
        return tuple((context, reply, version) for (context, reply), version in zip(replies, versions, strict=True))

    @property
    def ended(self) -> Collection[int]:
        return self.ended_keys

    @property
    def has_work(self) -> bool:
        return not self.is_over.all() and not self.stopping

    def sources(self) -> list[Any]:
        return self.agents.refs()

    def receive_source(self, ready: Any) -> None:
        for epoch, event in self.agents.collect(ready):
            self.handle_event(epoch, event)

    def remove_silent(self) -> None:
        super().remove_silent()
        for epoch, event in self.agents.replace_silent():
            self.handle_event(epoch, event)

    @property
    def awaited(self) -> str:
        turns = f"{len(self.waiting)} turns of the policy in progress"
        return f"{int((~self.is_over).sum())} of {self.total} episodes ({turns})"

    @property
    def done(self) -> int:
        return int(self.is_over.sum())

    @property
    def total(self) -> int:
        return len(self.episodes)

    # ---- turns ----------------------------------------------------------------------------------------------------

    def handle_event(self, epoch: int, event: TurnRequest | EpisodeEnd) -> None:
        """Send a requested turn to an engine, or record the end of an episode."""
        if isinstance(event, EpisodeEnd):
            self.is_over[event.key] = True
            self.ended_keys.append(event.key)
            if self.listener is not None:
                self.listener.add([replace(event, drawn=self.drawn_by(event.key))])
            for number in range(len(self.calls.engines)):  # an engine without unfinished episodes gets no more turns
                self.drain_if_idle(number)
            return
        episode = self.episodes[event.key]
        del self.agents.replies[event.key][event.turn :]  # the replayed agent requested a different turn
        del self.versions.setdefault(event.key, [])[event.turn :]
        i = self.token_log.add(
            replace(  # the other sampling parameters are the episode's
                episode,
                token_ids=event.token_ids,
                seed=turn_seed(episode.seed, event.turn),
                max_tokens=event.max_tokens,
                awaited=True,
                stop=event.stop,
                stop_token_ids=event.stop_token_ids,
                min_tokens=event.min_tokens,
            )
        )
        left = max(1.0, float(self.tokens[event.key] - self.written[event.key]))
        self.turns.append(min(left, event.max_tokens))
        self.expected = self.migrations.expected = self.turns.values
        self.waiting[i] = epoch, event
        self.calls.send(self.choose_engine(event.key), np.array([i]))

    def choose_engine(self, key: int) -> int:
        """Return the engine for an episode's next turn."""
        working = [self.calls.number(instance) for instance in self.pool.working]
        stay = [number for number in working if self.calls.engines[number].slot.node not in self.draining] or working
        if self.home[key] not in stay:
            available = [number for number in self.calls.available() if number in stay] or stay
            held = {number: int(((self.home == number) & ~self.is_over).sum()) for number in available}
            self.home[key] = min(available, key=lambda number: (held[number], number))
        return int(self.home[key])

    def complete(self, keys: list[int]) -> None:
        """Send completed turns to their agents."""
        answers: dict[int, list[tuple[tuple[int, ...], TurnReply]]] = {}
        for key in keys:
            epoch, event = self.waiting.pop(key)
            completion = self.token_log.completions[key]
            self.written[event.key] += len(completion.token_ids)
            reply = PolicyReply(completion.token_ids.tolist(), "", completion.logprobs.tolist(), completion.finish_reason)
            answers.setdefault(epoch, []).append((event.token_ids, TurnReply(event.key, event.turn, reply)))
        for epoch, replies in answers.items():
            self.agents.answer(epoch, replies)

    # ---- engines --------------------------------------------------------------------------------------------------

    def drain_if_idle(self, number: int) -> None:
        if not ((self.home == number) & ~self.is_over).any():
            super().drain_if_idle(number)

    def tail_s(self) -> float:
        left = np.maximum(self.tokens, OUTLIVES * self.written) - self.written
        return float(left[~self.is_over].max(initial=0.0)) * median_step_s(self.result.steps)


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn. Turn 0 has the sample's seed, so an episode of one turn equals a sample without an agent."""
    if not turn:
        return seed
    return int.from_bytes(hashlib.blake2b(struct.pack("<Qq", seed, turn), digest_size=8).digest(), "little")
