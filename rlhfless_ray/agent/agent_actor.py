"""A process in which agents run on a shared event loop.

The loop has a thread of its own, so that an agent that blocks it can be identified. Requests to the policy go to the driver,
which passes them to an engine: no engine process ever runs a user's code.
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

from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.episode import Episode
from rlhfless_ray.agent.episode_source import EpisodePlayer, EpisodeSource
from rlhfless_ray.agent.messages import AgentHung, CpuTime, EpisodeEnd, EpisodePort, EpisodeStart, TurnReply, TurnRequest
from rlhfless_ray.agent.multi_turn_loop import AgentError, check_sampling, min_tokens_of, stop_conditions
from rlhfless_ray.agent.sampling_params import SamplingParams
from rlhfless_ray.weights.load_policy import load_tokenizer
from rlhfless_ray.weights.tensor_file import Files

HEARTBEAT_S = 0.05  # interval at which the loop shows that it is not blocked
GATHER_EVENTS_S = 0.002  # time to collect events for one message: many episodes start and continue together
CANCEL_GRACE_S = 1.0  # a cancelled agent that has not ended after this long blocks its process

Event = TurnRequest | EpisodeEnd | AgentHung | CpuTime


class AgentActor:
    """Run agents' episodes. A plain class, which the driver wraps in an actor."""

    concurrency_groups: ClassVar = {"control": 1}  # `answer` runs beside `play`

    def __init__(
        self,
        source: EpisodeSource,
        files: Files,
        trust_remote_code: bool,
        max_length: int,
        timeout_s: float,
        turn_tokens: int | None = None,
    ) -> None:
        """Create the player.

        Args:
            files: the policy's folder; only its tokenizer is used.
            max_length: token limit of an episode.
            timeout_s: limit for one stretch of an agent's work, without the policy's turns.
            turn_tokens: token limit of a policy turn; None: no limit of its own.
        """
        self.max_length, self.timeout_s, self.turn_tokens = max_length, timeout_s, turn_tokens
        self.tokenizer = load_tokenizer(files, trust_remote_code)
        self.loop = asyncio.new_event_loop()
        self.out: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.episodes: dict[int, EpisodePort] = {}
        self.epoch = self.abandoned = 0
        self.heartbeat_s = time.monotonic()
        threading.Thread(target=self._run_loop, name="agents", daemon=True).start()
        player = asyncio.run_coroutine_threadsafe(self._create_player(source), self.loop)
        self.player: EpisodePlayer = player.result()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._heartbeat()
        self.loop.run_forever()

    def _heartbeat(self) -> None:
        self.heartbeat_s = time.monotonic()
        self.loop.call_later(HEARTBEAT_S, self._heartbeat)

    async def _create_player(self, source: EpisodeSource) -> EpisodePlayer:
        return source.player(self.tokenizer, self.max_length)  # inside the loop, because an executor's constructor may need it

    def ready(self) -> bool:
        return True

    # ---- the driver's side ------------------------------------------------------------------------------------

    def play(self, epoch: int, starts: list[EpisodeStart]) -> Iterator[list[Event]]:
        """Play all episodes. Yields batches of events: the process's CPU time first, then requests and finished episodes.

        `epoch` numbers the calls.
        """
        self.out = queue.SimpleQueue()
        self.episodes, self.epoch = {one.key: EpisodePort(one, self.out) for one in starts}, epoch
        left = len(starts)
        for episode_port in list(self.episodes.values()):
            episode_port.playing = asyncio.run_coroutine_threadsafe(self._play(episode_port), self.loop)
        while left and epoch > self.abandoned:
            events = self._events()
            left -= sum(isinstance(event, EpisodeEnd) for event in events)
            if not events and (hung := self._find_hung_agent()):
                events = [hung]
            if events:
                yield [_cpu_time(), *events]
        for episode_port in self.episodes.values():
            episode_port.playing.cancel()

    def abandon(self, epoch: int) -> None:
        """End the call without the episodes that still play, in the concurrency group "control"."""
        self.abandoned = epoch

    def answer(self, epoch: int, answers: list[TurnReply]) -> None:
        """Deliver policy turns, in the concurrency group "control". Turns for an earlier call are dropped."""
        episodes = self.episodes
        if epoch == self.epoch:
            self.loop.call_soon_threadsafe(_deliver, episodes, answers)

    def _events(self) -> list[Event]:
        try:
            events = [self.out.get(timeout=HEARTBEAT_S)]
        except queue.Empty:
            return []
        time.sleep(GATHER_EVENTS_S)
        while not self.out.empty():
            events.append(self.out.get())
        return events

    def _find_hung_agent(self) -> AgentHung | None:
        now = time.monotonic()
        if now - self.heartbeat_s > self.timeout_s:
            running = asyncio.current_task(self.loop)  # it may be of an abandoned call
            at_fault = (key for key, port in self.episodes.items() if port.task is running is not None)
            return AgentHung(next(at_fault, None), now - self.heartbeat_s)
        limit_s = self.timeout_s + CANCEL_GRACE_S
        for key, episode_port in list(self.episodes.items()):
            if episode_port.agent_since_s is not None and now - episode_port.agent_since_s > limit_s:
                return AgentHung(key, now - episode_port.agent_since_s)
        return None

    # ---- in the loop ------------------------------------------------------------------------------------------

    async def _play(self, episode_port: EpisodePort) -> None:
        async with self.player.seats:
            await self._play_seated(episode_port)

    async def _play_seated(self, episode_port: EpisodePort) -> None:
        start = episode_port.start
        episode_port.task = asyncio.current_task()
        given = SamplingParams(
            temperature=start.temperature,
            top_p=start.top_p,
            top_k=start.top_k or -1,
            stop=list(start.stop) or None,
            max_tokens=None,
            min_tokens=start.min_tokens,
            logprobs=1,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
        )
        result: Episode | str
        episode_port.agent_since_s = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s) as limit:

                async def generate(token_ids: list[int], params: object) -> PolicyReply:
                    return await self._generate(episode_port, limit, given, token_ids, params)

                result = await self.player.play(start.prompt, start.label, given, generate)
            if limit.expired():  # the agent caught the cancellation
                raise TimeoutError
        except TimeoutError:
            result = f"the agent took longer than agent.timeout_s = {self.timeout_s:g} s"
        except Exception as error:  # always reported: the driver waits for every episode
            result = f"{type(error).__name__}: {error}"
        if episode_port.agent_since_s is not None:
            episode_port.agent_s += time.monotonic() - episode_port.agent_since_s
        episode_port.agent_since_s, episode_port.is_over = None, True
        episode_port.out.put(self._end_of(episode_port, result))

    async def _generate(
        self, episode_port: EpisodePort, limit: asyncio.Timeout, given: object, token_ids: list[int], params: Any
    ) -> PolicyReply:
        """Request a policy turn. The agent's time limit is paused meanwhile."""
        if limit.expired():
            raise TimeoutError("this episode's time is over")
        check_sampling(given, params)
        stop, stop_tokens = stop_conditions(params)
        room = self.max_length - len(token_ids)
        if not token_ids or room < 1:
            raise AgentError(f"generate: a context of {len(token_ids)} tokens, of {self.max_length} that an episode may have")
        context, turn = tuple(token_ids), episode_port.turns
        episode_port.turns += 1
        max_tokens = min(int(tokens) for tokens in (room, params.max_tokens, self.turn_tokens) if tokens is not None)
        if max_tokens < 1:
            raise AgentError(f"generate: `sampling_params` with max_tokens={params.max_tokens}")
        earlier = episode_port.start.earlier_replies
        if turn < len(earlier) and earlier[turn][0] == context:
            reply = earlier[turn][1]
        else:
            if episode_port.agent_since_s is not None:
                episode_port.agent_s += time.monotonic() - episode_port.agent_since_s
                episode_port.agent_since_s = None
                limit.reschedule(None)
            future = episode_port.waiting[turn] = self.loop.create_future()
            episode_port.out.put(
                TurnRequest(episode_port.start.key, turn, context, max_tokens, stop, stop_tokens, min(min_tokens_of(params), max_tokens))
            )
            reply = await future
            if not episode_port.waiting and not episode_port.is_over and not limit.expired():
                episode_port.agent_since_s = time.monotonic()
                limit.reschedule(self.loop.time() + self.timeout_s)
        reply = PolicyReply(reply.token_ids, self._reply_text(reply, params, stop), reply.logprobs, reply.finish_reason)
        episode_port.replies.append((context, reply))
        return reply

    def _reply_text(self, reply: PolicyReply, params: object, stop: tuple[str, ...]) -> str:
        """Return the text that vLLM would return for these sampling parameters."""
        ids, ended = list(reply.token_ids), reply.finish_reason == "stop"
        skip, shown = getattr(params, "skip_special_tokens", True), getattr(params, "include_stop_str_in_output", False)
        free = ids[: min_tokens_of(params)]  # a stop string within the minimum number of tokens does not end a turn
        whole, whole_free = self._text(ids), len(self._text(free))
        words = [word for word in stop if ended and whole.find(word, max(0, whole_free - len(word) + 1)) >= 0]
        if ended and not words and not shown:
            ids = ids[:-1]  # without the stop token
        text = self.tokenizer.decode(ids, skip_special_tokens=skip)
        text_free = len(self.tokenizer.decode(free, skip_special_tokens=skip))
        positions = [(word, text.find(word, max(0, text_free - len(word) + 1))) for word in words]
        return text[: min((at + (len(word) if shown else 0) for word, at in positions if at >= 0), default=len(text))]

    def _text(self, token_ids: Any) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _end_of(self, episode_port: EpisodePort, result: Episode | str) -> EpisodeEnd:
        key = episode_port.start.key
        if isinstance(result, str):
            return EpisodeEnd(key, result, agent_s=episode_port.agent_s)
        if result.logprobs is None:
            result = add_logprobs(result, episode_port.replies)
            if isinstance(result, str):
                return EpisodeEnd(key, result, agent_s=episode_port.agent_s)
        rest = result.token_ids[result.prompt_tokens :]
        bounds = [0, *(np.flatnonzero(np.diff(result.action)) + 1).tolist(), len(rest)]
        texts = tuple(("policy" if result.action[a] else "agent", self._text(rest[a:b].tolist())) for a, b in itertools.pairwise(bounds))
        return EpisodeEnd(key, result, self._text(result.token_ids[: result.prompt_tokens].tolist()), texts, episode_port.agent_s)


def _cpu_time() -> CpuTime:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return CpuTime(time.process_time() + ended.ru_utime + ended.ru_stime)


def _deliver(episodes: dict[int, EpisodePort], answers: list[TurnReply]) -> None:
    for one in answers:
        future = episodes[one.key].waiting.pop(one.turn, None)
        if future is not None and not future.done():
            future.set_result(one.reply)


def add_logprobs(episode: Episode, replies: list[tuple[tuple[int, ...], PolicyReply]]) -> Episode | str:
    """Add log-probabilities to an episode whose executor returned none, from the policy's replies at the same positions.

    Returns an error message if an action token was not generated at its position.
    """
    tokens, first = episode.token_ids, episode.prompt_tokens
    logprobs = np.full(len(tokens) - first, np.nan, np.float32)
    for context, reply in replies:
        start, end = len(context), len(context) + len(reply.token_ids)
        if tuple(tokens[:end].tolist()) == (*context, *reply.token_ids) and start >= first:
            logprobs[start - first : end - first] = reply.logprobs
    if np.isnan(logprobs[episode.action]).any():
        at = int(np.flatnonzero(np.isnan(logprobs) & episode.action)[0]) + first
        return f"`execute` returned no `rollout_log_probs`, and its action token {at} is not what the policy generated there"
    return replace(episode, logprobs=np.where(episode.action, logprobs, np.float32(0)))
