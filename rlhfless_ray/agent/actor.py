"""A process in which agents play. They share an event loop in a thread of its own, so that one that holds it can be named.

What they ask the policy goes to the driver, which has an engine answer it: no engine's process ever runs a user's code.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from rlhfless_ray.agent.engine import Reply
from rlhfless_ray.agent.episode import Episode
from rlhfless_ray.agent.load import AgentSource, Player
from rlhfless_ray.agent.messages import Answered, Asked, Hand, Opening, Played, Stuck, Worked
from rlhfless_ray.agent.params import SamplingParams
from rlhfless_ray.agent.turns import AgentError, check_sampling, stops_of
from rlhfless_ray.policy_files import load_tokenizer

BEAT_S = 0.05  # how often the loop shows that it turns
GATHER_S = 0.002  # what comes within it is told at once: many episodes begin, and are answered, together
OBEYS_S = 1.0  # an agent that was told to end after its time and has not after so much more holds its process

Event = Asked | Played | Stuck | Worked


class AgentActor:
    """A plain class; the driver wraps it in an actor."""

    concurrency_groups: ClassVar = {"control": 1}  # `answer` comes while `play` works

    def __init__(
        self, source: AgentSource, files: dict[str, bytes], trust_remote_code: bool, max_length: int, timeout_s: float,
        turn_tokens: int | None = None,
    ) -> None:
        """`files`: tokenizer; `max_length`: tokens of an episode; `timeout_s`: that an agent may take at a time; `turn_tokens`: of
        a turn of the policy."""
        self.max_length, self.timeout_s, self.turn_tokens = max_length, timeout_s, turn_tokens
        self.tokenizer = load_tokenizer(files, trust_remote_code)
        self.loop = asyncio.new_event_loop()
        self.out: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.hands: dict[int, Hand] = {}
        self.epoch = 0
        self.beat_s = time.monotonic()
        threading.Thread(target=self._turn, name="agents", daemon=True).start()
        made = asyncio.run_coroutine_threadsafe(self._made(source), self.loop)
        self.player: Player = made.result()

    def _turn(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._beat()
        self.loop.run_forever()

    def _beat(self) -> None:
        self.beat_s = time.monotonic()
        self.loop.call_later(BEAT_S, self._beat)

    async def _made(self, source: AgentSource) -> Player:
        return Player(source, self.tokenizer, None, self.max_length)  # in the loop: executors may want it

    def ready(self) -> bool:
        return True

    # ---- the driver's side ------------------------------------------------------------------------------------

    def play(self, epoch: int, openings: list[Opening]) -> Iterator[list[Event]]:
        """Play them all; yields what agents ask for, and the episodes as they end, after what the process has worked so far.
        `epoch` numbers the calls."""
        self.out, self.hands, self.epoch = queue.SimpleQueue(), {one.key: Hand(one) for one in openings}, epoch
        left = len(openings)
        for hand in list(self.hands.values()):
            asyncio.run_coroutine_threadsafe(self._play(hand), self.loop)
        while left:
            events = self._events()
            left -= sum(isinstance(event, Played) for event in events)
            if not events and (stuck := self._stuck()):
                events = [stuck]
            if events:
                yield [_worked(), *events]

    def answer(self, epoch: int, answers: list[Answered]) -> None:
        """In the group "control". What is for another call comes too late."""
        hands = self.hands
        if epoch == self.epoch:
            self.loop.call_soon_threadsafe(_answered, hands, answers)

    def _events(self) -> list[Event]:
        try:
            found = [self.out.get(timeout=BEAT_S)]
        except queue.Empty:
            return []
        time.sleep(GATHER_S)
        while not self.out.empty():
            found.append(self.out.get())
        return found

    def _stuck(self) -> Stuck | None:
        now = time.monotonic()
        if now - self.beat_s > self.timeout_s:
            task = asyncio.current_task(self.loop)
            name = task.get_name() if task is not None else ""
            return Stuck(int(name) if name in map(str, self.hands) else None, now - self.beat_s)
        late = self.timeout_s + OBEYS_S
        for key, hand in list(self.hands.items()):
            if hand.since_s is not None and now - hand.since_s > late:
                return Stuck(key, now - hand.since_s)
        return None

    # ---- in the loop ------------------------------------------------------------------------------------------

    async def _play(self, hand: Hand) -> None:
        opening = hand.opening
        task = asyncio.current_task()
        assert task is not None
        task.set_name(str(opening.key))
        given = SamplingParams(
            temperature=opening.temperature, top_p=opening.top_p, top_k=-1, max_tokens=None, min_tokens=1, logprobs=1,
            skip_special_tokens=False, include_stop_str_in_output=True,
        )
        result: Episode | str
        hand.since_s = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s) as limit:

                async def generate(token_ids: list[int], params: Any) -> Reply:
                    return await self._generate(hand, limit, given, token_ids, params)

                result = await self.player.play(opening.prompt, opening.label, given, generate)
            if limit.expired():  # it swallowed that
                raise TimeoutError
        except TimeoutError:
            result = f"the agent took longer than agent.timeout_s = {self.timeout_s:g} s"
        except Exception as error:  # never silent: the driver waits for each of them
            result = f"{type(error).__name__}: {error}"
        if hand.since_s is not None:
            hand.agent_s += time.monotonic() - hand.since_s
        hand.since_s, hand.over = None, True
        self.out.put(self._played(hand, result))

    async def _generate(self, hand: Hand, limit: asyncio.Timeout, given: Any, token_ids: list[int], params: Any) -> Reply:
        """The policy's turn. The agent's clock stands still meanwhile."""
        if limit.expired():
            raise TimeoutError("this episode's time is over")
        check_sampling(given, params)
        stop, stop_tokens = stops_of(params)
        room = self.max_length - len(token_ids)
        if not token_ids or room < 1:
            raise AgentError(f"generate: a context of {len(token_ids)} tokens, of {self.max_length} that an episode may have")
        context, turn = tuple(token_ids), hand.turns
        hand.turns += 1
        most = min(int(tokens) for tokens in (room, params.max_tokens, self.turn_tokens) if tokens is not None)
        if most < 1:
            raise AgentError(f"generate: `sampling_params` with max_tokens={params.max_tokens}")
        said = hand.opening.said
        if turn < len(said) and said[turn][0] == context:
            reply = said[turn][1]
        else:
            if hand.since_s is not None:
                hand.agent_s += time.monotonic() - hand.since_s
                hand.since_s = None
                limit.reschedule(None)
            future = hand.waiting[turn] = self.loop.create_future()
            self.out.put(Asked(hand.opening.key, turn, context, most, stop, stop_tokens))
            reply = await future
            if not hand.waiting and not hand.over and not limit.expired():
                hand.since_s = time.monotonic()
                limit.reschedule(self.loop.time() + self.timeout_s)
        reply = Reply(reply.token_ids, self._said(reply, params, stop), reply.logprobs, reply.finish_reason)
        hand.replies.append((context, reply))
        return reply

    def _said(self, reply: Reply, params: Any, stop: tuple[str, ...]) -> str:
        """The text that vLLM would give, with the parameters that were asked for."""
        ids, ended = list(reply.token_ids), reply.finish_reason == "stop"
        skip, shown = getattr(params, "skip_special_tokens", True), getattr(params, "include_stop_str_in_output", False)
        whole = self._text(ids)
        words = [word for word in stop if ended and word in whole]
        if ended and not words and not shown:
            ids = ids[:-1]  # the token that ended it
        text = self.tokenizer.decode(ids, skip_special_tokens=skip)
        ends = [text.find(word) + (len(word) if shown else 0) for word in words if word in text]
        return text[: min(ends, default=len(text))]

    def _text(self, token_ids: Any) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _played(self, hand: Hand, result: Episode | str) -> Played:
        key = hand.opening.key
        if isinstance(result, str):
            return Played(key, result, agent_s=hand.agent_s)
        if result.logprobs is None:
            result = with_logprobs(result, hand.replies)
            if isinstance(result, str):
                return Played(key, result, agent_s=hand.agent_s)
        rest = result.token_ids[result.prompt_tokens :]
        bounds = [0, *(np.flatnonzero(np.diff(result.action)) + 1).tolist(), len(rest)]
        texts = tuple(
            ("policy" if result.action[a] else "agent", self._text(rest[a:b].tolist())) for a, b in itertools.pairwise(bounds)
        )
        return Played(key, result, self._text(result.token_ids[: result.prompt_tokens].tolist()), texts, hand.agent_s)


def _worked() -> Worked:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Worked(time.process_time() + ended.ru_utime + ended.ru_stime)


def _answered(hands: dict[int, Hand], answers: list[Answered]) -> None:
    for one in answers:
        future = hands[one.key].waiting.pop(one.turn, None)
        if future is not None and not future.done():
            future.set_result(one.reply)


def with_logprobs(episode: Episode, replies: list[tuple[tuple[int, ...], Reply]]) -> Episode | str:
    """The episode of an executor that does not tell log-probabilities, with those of the turns that it asked for: of each run of
    actions, as they stand where they were generated. A sentence where a token was not generated there."""
    tokens, first = episode.token_ids, episode.prompt_tokens
    found = np.full(len(tokens) - first, np.nan, np.float32)
    for context, reply in replies:
        start, end = len(context), len(context) + len(reply.token_ids)
        if tuple(tokens[:end].tolist()) == (*context, *reply.token_ids) and start >= first:
            found[start - first : end - first] = reply.logprobs
    if np.isnan(found[episode.action]).any():
        at = int(np.flatnonzero(np.isnan(found) & episode.action)[0]) + first
        return f"`execute` returned no `rollout_log_probs`, and its action token {at} is not what the policy generated there"
    return replace(episode, logprobs=np.where(episode.action, found, np.float32(0)))
