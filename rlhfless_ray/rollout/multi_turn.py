"""Roll out agents' episodes: each turn of the policy is a request, which the agent's last feedback leads to.

An episode's turns go to the engine of its last turn, whose cache holds the context. If that engine is gone, they go to the engine
with the fewest episodes. A turn's tokens depend only on the sample's seed, the turn's number and the context.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfless_ray.agent.agent_processes import AgentProcesses
from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.episode_samples import EpisodeSamples
from rlhfless_ray.agent.messages import Drawn, EpisodeEnd, EpisodeStart, TurnReply, TurnRequest
from rlhfless_ray.agent.unfinished_episode import replies_of, unfinished_episode, versions_of_turns
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.rollout.engine_calls import Ref
from rlhfless_ray.rollout.events import Event, RolloutProgress, SamplesMade
from rlhfless_ray.rollout.live_rollout import RequestSource
from rlhfless_ray.rollout.request_source import WantedResponses
from rlhfless_ray.rollout.token_log import OUTLIVES, TokenLog
from rlhfless_ray.types import UNFINISHED, Completion


class EpisodeTurns(RequestSource):
    """Turns of agents' episodes. The token log has a request for each turn. Turns are never moved."""

    samples: EpisodeSamples

    def __init__(self, agents: AgentProcesses, label_of: Callable[[JsonObject], Any], wanted: WantedResponses) -> None:
        """`label_of`: the label of a row. The wanted requests are the episodes: each turn determines its token ids."""
        requests, before = wanted.requests, wanted.before
        self.samples = EpisodeSamples(requests, wanted.prompts, wanted.version)
        prompts = [self.samples.prompts[request.id.row] for request in requests]
        labels = [label_of(prompt.row) for prompt in prompts]
        self.token_log, self.total = TokenLog([]), len(requests)
        self.agents, self.episodes, self.tokens = agents, requests, wanted.expected
        self.version, self.cuts = wanted.version, wanted.cuts
        self.ended: list[int] = [key for key, completion in before.items() if completion.finish_reason != UNFINISHED]
        self.is_over = np.zeros(len(requests), bool)
        self.is_over[self.ended] = True
        earlier = {key: replies_of(completion) for key, completion in before.items()}
        self.openings = [
            EpisodeStart(
                one.key, prompt.text, label, one.temperature, one.top_p, one.top_k, one.stop, one.min_tokens, earlier.get(one.key, ())
            )
            for one, prompt, label in zip(requests, prompts, labels, strict=True)
            if not self.is_over[one.key]
        ]
        agents.take_over(self.openings)  # now, because a rollout with enough complete groups ends before its episodes begin
        self.versions = {key: list(versions_of_turns(completion)) for key, completion in before.items()}  # of the turns so far, by key
        self.written = np.zeros(len(requests), np.int64)
        for key, completion in before.items():
            self.written[key] = len(completion.token_ids)
        self.home = np.full(len(requests), -1)  # number of each episode's engine
        self.waiting: dict[int, tuple[int, TurnRequest]] = {}  # by request: the agent call's epoch, and the turn it requested
        self.stopped, self.cut_tokens = False, 0

    # ---- the rollout's responses ----------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return not self.is_over.all() and not self.stopped

    def awaited(self) -> str:
        turns = f"{len(self.waiting)} turns of the policy in progress"
        return f"{int((~self.is_over).sum())} of {self.total} episodes ({turns})"

    def assign(self, number: int, share: np.ndarray) -> None:
        self.home[share] = number

    def start(self) -> None:
        self.agents.begin(self.openings)

    def stop(self) -> None:
        self.stopped = True
        self.agents.abandon()

    def needs(self, number: int) -> bool:
        return bool(((self.home == number) & ~self.is_over).any())

    def left(self) -> np.ndarray:
        return np.where(self.is_over, 0.0, np.maximum(self.tokens, OUTLIVES * self.written) - self.written)

    def unfinished(self) -> list[Completion]:
        """Return the finished turns of the unfinished episodes. A cut turn begins again in the next step."""
        self.cut_tokens = int(self.token_log.length[~self.token_log.finished].sum())
        return [unfinished_episode(key, self._drawn_by(key), self.version) for key in np.flatnonzero(~self.is_over).tolist()]

    def _drawn_by(self, key: int) -> Drawn:
        """Return an episode's turns of the policy with their versions. Turns of this rollout have the newest version."""
        before = self.versions.get(key, [])
        replies = self.agents.replies[key]
        versions = [*before, *[self.version] * (len(replies) - len(before))]
        return tuple((context, reply, version) for (context, reply), version in zip(replies, versions, strict=True))

    def metrics(self, before: Mapping[str, Any]) -> JsonObject:
        cut = {"agent/cut_tokens": self.cut_tokens + before.get("agent/cut_tokens", 0)} if self.cuts else {}
        return self.samples.metrics() | cut

    # ---- turns ----------------------------------------------------------------------------------------------------

    def refs(self) -> list[Ref]:
        return self.agents.refs()

    def receive(self, ref: Ref) -> None:
        for epoch, happened in self.agents.collect(ref):
            self._handle(epoch, happened)

    def on_event(self, event: Event) -> None:
        if isinstance(event, RolloutProgress):
            for epoch, end in self.agents.replace_silent():
                self._handle(epoch, end)

    def _handle(self, epoch: int, happened: TurnRequest | EpisodeEnd) -> None:
        """Send a requested turn to an engine, or record the end of an episode."""
        if isinstance(happened, EpisodeEnd):
            self.is_over[happened.key] = True
            self.ended.append(happened.key)
            self.rollout.emit(SamplesMade(self.samples.add([replace(happened, drawn=self._drawn_by(happened.key))])))
            for number in range(len(self.rollout.calls.engines)):  # an engine without unfinished episodes gets no more turns
                self.rollout.drain_if_idle(number)
            return
        key, turn = happened.key, happened.turn
        del self.agents.replies[key][turn:]  # the replayed agent requested a different turn
        del self.versions.setdefault(key, [])[turn:]
        request = replace(  # the other sampling parameters are the episode's
            self.episodes[key],
            token_ids=happened.token_ids,
            seed=turn_seed(self.episodes[key].seed, turn),
            max_tokens=happened.max_tokens,
            awaited=True,
            stop=happened.stop,
            stop_token_ids=happened.stop_token_ids,
            min_tokens=happened.min_tokens,
        )
        left = max(1.0, float(self.tokens[key] - self.written[key]))
        i = self.token_log.add(request, min(left, happened.max_tokens))
        self.waiting[i] = epoch, happened
        self.rollout.calls.send(self._choose_engine(key), np.array([i]))

    def _choose_engine(self, key: int) -> int:
        """Return the engine for an episode's next turn."""
        calls = self.rollout.calls
        working = [calls.number(instance) for instance in self.rollout.pool.working]
        stay = [number for number in working if calls.engines[number].slot.node not in calls.draining] or working
        if self.home[key] not in stay:
            available = [number for number in calls.available() if number in stay] or stay
            held = {number: int(((self.home == number) & ~self.is_over).sum()) for number in available}
            self.home[key] = min(available, key=lambda number: (held[number], number))
        return int(self.home[key])

    def complete(self, keys: list[int]) -> None:
        """Send completed turns to their agents."""
        answers: dict[int, list[tuple[tuple[int, ...], TurnReply]]] = {}
        for key in keys:
            epoch, turn = self.waiting.pop(key)
            completion = self.token_log.completions[key]
            self.written[turn.key] += len(completion.token_ids)
            reply = PolicyReply(completion.token_ids.tolist(), "", completion.logprobs.tolist(), completion.finish_reason)
            answers.setdefault(epoch, []).append((turn.token_ids, TurnReply(turn.key, turn.turn, reply)))
        for epoch, replies in answers.items():
            self.agents.answer(epoch, replies)


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn. Turn 0 has the sample's seed, so an episode of one turn equals a sample without an agent."""
    if not turn:
        return seed
    return int.from_bytes(hashlib.blake2b(struct.pack("<Qq", seed, turn), digest_size=8).digest(), "little")
