"""The driver's side of agent processes: distribute episodes, and replace processes that hang or die."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.load_agent import KEY
from rlhfless_ray.agent.messages import AgentHung, CpuTime, EpisodeEnd, EpisodeStart, TurnReply, TurnRequest
from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.functions.failure_budget import FailureBudget, FailureCause
from rlhfless_ray.functions.instance import GONE, reason_of, start_actor
from rlhfless_ray.functions.lease import Slot
from rlhfless_ray.functions.ledger import Ledger

SILENCE_S = 30.0  # added to an agent's time limit: a process that is silent for longer cannot even report that it hangs
_epochs, _numbers = itertools.count(1), itertools.count(1)


@dataclass
class _AgentProcess:
    """A process and its current call.

    `batches`: episodes of later calls. `playing`: episodes of this call by key. `with_agent`: keys of those that wait for the
    agent, not for the policy.
    """

    actor: Any
    opened: Any
    batches: list[list[EpisodeStart]] = field(default_factory=list)
    epoch: int = 0
    generator: Any = None
    playing: dict[int, EpisodeStart] = field(default_factory=dict)
    with_agent: set[int] = field(default_factory=set)
    is_single: bool = False  # the call has one episode, which is at fault if the process ends
    last_event_s: float = 0.0
    id: str = field(default_factory=lambda: f"agent-{next(_numbers)}")
    unbooked_since_s: float = field(default_factory=time.time)  # start of the process or call that is not in the ledger yet
    cpu_s: float = 0.0  # CPU time of the process as last reported
    booked_cpu_s: float = 0.0  # part of it that is in the ledger


class AgentProcesses:
    """Agent processes on the driver's node. Like the driver they hold no slot; the ledger records their CPU time.

    The driver keeps the policy's replies, so an episode whose process died is played again with the same ones. The episode
    at fault is known if it blocked the event loop. Otherwise episodes that waited for the agent are played again one by one.
    The one that ends its process again gets an error instead of a reward.
    """

    def __init__(self, start: Any, count: int, timeout_s: float, faults: FailureBudget, deadline_s: float, ledger: Ledger) -> None:
        """`start`: creates an actor (see `AgentActor`). `deadline_s`: limit for its start."""
        self.ledger = ledger
        self._start, self.count, self.timeout_s, self.faults, self.deadline_s = start, count, timeout_s, faults, deadline_s
        self.processes: list[_AgentProcess] = []
        self.replies: dict[int, list[tuple[tuple[int, ...], PolicyReply]]] = {}
        self.replaced = 0

    # ---- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes without waiting for them."""
        self.processes = [self._start_process() for _ in range(self.count)]

    def _start_process(self) -> _AgentProcess:
        actor = self._start()
        return _AgentProcess(actor, actor.ready.remote())

    def check(self) -> None:
        """Wait until all processes have started. Raises UserError if the agent file's executor cannot be created."""
        for process in self.processes:
            try:
                get(process.opened, self.deadline_s, "the agent's process to start")
            except (*GONE, RayTaskError) as error:
                raise UserError(f"{KEY}: the agent could not be created: {reason_of(error)}") from None

    def close(self) -> None:
        for process in self.processes:
            self._book_cpu_time(process)
            ray.kill(process.actor, no_restart=True)
        self.processes = []

    # ---- a rollout --------------------------------------------------------------------------------------------

    def take_over(self, openings: list[EpisodeStart]) -> None:
        """Keep the earlier replies of a rollout's episodes, and forget those of the rollout before."""
        self.replies = {opening.key: list(opening.earlier_replies) for opening in openings}

    def begin(self, openings: list[EpisodeStart]) -> None:
        for k, process in enumerate(self.processes):
            process.batches = [part] if (part := openings[k :: len(self.processes)]) else []
            self._play_next_batch(process)

    def abandon(self) -> None:
        """End the rollout without the episodes that still play."""
        for process in self.processes:
            if process.generator is not None:
                process.actor.abandon.options(concurrency_group="control").remote(process.epoch)
                self._book_cpu_time(process)
            process.batches, process.playing, process.with_agent, process.generator = [], {}, set(), None

    def refs(self) -> list[Any]:
        return [process.generator for process in self.processes if process.generator is not None]

    def collect(self, ref: object) -> Iterator[tuple[int, TurnRequest | EpisodeEnd]]:
        """Yield (epoch of the call, event) for the events behind a ready reference.

        Raises RunError when the failure budget is used up.
        """
        process = next((p for p in self.processes if p.generator is ref), None)
        if process is None:  # the process was replaced meanwhile
            return
        try:
            events = ray.get(next(process.generator))
        except StopIteration:
            self._play_next_batch(process)
            return
        except GONE as error:
            yield from self._replace(process, None, FailureCause.DIED, reason_of(error))
            return
        except RayTaskError as error:
            raise RunError(f"the agent's process failed: {reason_of(error)}") from error
        process.last_event_s = time.monotonic()
        for event in events:
            if isinstance(event, CpuTime):
                process.cpu_s = event.cpu_s
                continue
            if isinstance(event, AgentHung):
                why = f"the agent held its process for {event.seconds:.0f} s (agent.timeout_s = {self.timeout_s:g} s)"
                yield from self._replace(process, event.key, FailureCause.HUNG, why)
                return
            if isinstance(event, EpisodeEnd):
                process.playing.pop(event.key, None)
            process.with_agent.discard(event.key)
            yield process.epoch, event
        if not process.playing:  # the end of the call may never be collected
            self._book_cpu_time(process)

    def answer(self, epoch: int, answers: Iterable[tuple[tuple[int, ...], TurnReply]]) -> None:
        """Deliver (context, turn) pairs to the call that requested them. Turns of a finished call are only kept."""
        process = next((p for p in self.processes if p.epoch == epoch), None)
        delivered = []
        for context, answer in answers:
            replies = self.replies[answer.key]
            if answer.turn == len(replies):
                replies.append((context, answer.reply))
            delivered.append(answer)
            if process is not None and answer.key in process.playing:
                process.with_agent.add(answer.key)
        if process is not None and delivered:
            process.last_event_s = time.monotonic()
            process.actor.answer.options(concurrency_group="control").remote(epoch, delivered)

    def replace_silent(self) -> Iterator[tuple[int, EpisodeEnd]]:
        """Replace processes that have been silent for too long while an agent had a turn."""
        for process in list(self.processes):
            silent = time.monotonic() - process.last_event_s
            if process.generator is not None and process.with_agent and silent > self.timeout_s + SILENCE_S:
                yield from self._replace(process, None, FailureCause.HUNG, f"it did not respond for {silent:.0f} s")

    def _book_cpu_time(self, process: _AgentProcess) -> None:
        """Record the CPU time of the process's current call in the ledger; the first call includes the start."""
        if process.cpu_s > process.booked_cpu_s:
            node, taken_s = ray.get_runtime_context().get_node_id(), process.cpu_s - process.booked_cpu_s
            self.ledger.unleased("agent", process.id, node, process.unbooked_since_s, time.time(), taken_s, "agents play")
            process.booked_cpu_s = process.cpu_s

    def _play_next_batch(self, process: _AgentProcess) -> None:
        self._book_cpu_time(process)
        process.generator, process.playing, process.with_agent = None, {}, set()
        if not process.batches:
            return
        batch = process.batches.pop(0)
        process.playing, process.epoch, process.is_single = {start.key: start for start in batch}, next(_epochs), len(batch) == 1
        process.unbooked_since_s = time.time() if process.booked_cpu_s else process.unbooked_since_s
        process.with_agent = set(process.playing)
        process.last_event_s = time.monotonic() + self.deadline_s  # the process may have to start first
        process.generator = process.actor.play.options(num_returns="streaming").remote(process.epoch, batch)

    def _replace(self, process: _AgentProcess, key: int | None, cause: FailureCause, why: str) -> Iterator[tuple[int, EpisodeEnd]]:
        """Replace a process and replay its episodes. `key`: the episode at fault, if known."""
        self._book_cpu_time(process)
        ray.kill(process.actor, no_restart=True)
        self.replaced += 1
        if process.is_single and key is None:
            key = next(iter(process.playing), None)
        starts = (start for start in process.playing.values() if start.key != key)
        left = [replace(start, earlier_replies=tuple(self.replies[start.key])) for start in starts]
        suspects = [] if key is not None else [start for start in left if start.key in process.with_agent]
        fresh = self._start_process()
        fresh.batches = [b for b in ([o for o in left if o not in suspects], *([o] for o in suspects)) if b] + process.batches
        self.processes[self.processes.index(process)] = fresh
        if key is not None:
            yield process.epoch, EpisodeEnd(key, f"the agent's process {cause.value} and was replaced: {why}")
        self.faults.count("the agent's process", cause, why)
        self._play_next_batch(fresh)


def start_agent(cls: Any, *arguments: Any, resource: str = "cpu") -> Any:
    """Start an actor on this node without a slot. On GPU clusters no device is visible to it."""
    return start_actor(cls, Slot(ray.get_runtime_context().get_node_id(), ""), resource, {}, *arguments)
