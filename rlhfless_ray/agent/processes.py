"""The processes of a run's agents, seen from the driver: who plays what, and what becomes of it when one hangs or dies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhfless_ray.agent.engine import Reply
from rlhfless_ray.agent.load import KEY
from rlhfless_ray.agent.messages import Answered, Asked, Opening, Played, Stuck, Worked
from rlhfless_ray.errors import RunError, UserError
from rlhfless_ray.functions.faults import Cause, Faults
from rlhfless_ray.functions.instance import GONE, reason_of
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.waits import get

SILENT_S = 30.0  # beyond an agent's time: a process that says nothing for so long hangs where not even its watch can tell
_epochs, _numbers = itertools.count(1), itertools.count(1)


@dataclass
class _Process:
    """batches: what it still has to begin; playing: openings of the call under way, by key; held: keys of those that the agent
    has, and not the policy."""

    actor: Any
    opened: Any
    batches: list[list[Opening]] = field(default_factory=list)
    epoch: int = 0
    generator: Any = None
    playing: dict[int, Opening] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    alone: bool = False  # the call has one episode: whatever ends the process is that one's doing
    heard_s: float = 0.0
    id: str = field(default_factory=lambda: f"agent-{next(_numbers)}")
    began_s: float = field(default_factory=time.time)  # what is not booked yet: with the process, or with its call
    core_s: float = 0.0  # of a core, since the process began, as it told last
    booked_s: float = 0.0  # of these


class Processes:
    """They work on the driver's node and, as the driver, hold no slot; what they take of its cores is in the ledger all the same.

    What the policy said stays with the driver: an episode whose process died is played again with the same replies. Which one is
    at fault is known where it held the event loop; else those that the agent had are played again one by one, and the one
    that ends its process once more has an error for a reward.
    """

    def __init__(self, start: Any, count: int, timeout_s: float, faults: Faults, deadline_s: float, ledger: Ledger) -> None:
        """`start()` makes an actor (see `AgentActor`); `deadline_s`: for its start."""
        self.ledger = ledger
        self._start, self.count, self.timeout_s, self.faults, self.deadline_s = start, count, timeout_s, faults, deadline_s
        self.processes: list[_Process] = []
        self.said: dict[int, list[tuple[tuple[int, ...], Reply]]] = {}
        self.replaced = 0

    # ---- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Not waited for."""
        self.processes = [self._process() for _ in range(self.count)]

    def _process(self) -> _Process:
        actor = self._start()
        return _Process(actor, actor.ready.remote())

    def check(self) -> None:
        """Wait for the start. Raises UserError when the agent file's executor cannot be made."""
        for process in self.processes:
            try:
                get(process.opened, self.deadline_s, "the agent's process to start")
            except (*GONE, RayTaskError) as error:
                raise UserError(f"{KEY}: the agent could not be made: {reason_of(error)}") from None

    def close(self) -> None:
        for process in self.processes:
            self._book(process)
            ray.kill(process.actor, no_restart=True)
        self.processes = []

    # ---- a rollout --------------------------------------------------------------------------------------------

    def begin(self, openings: list[Opening]) -> None:
        self.said = {one.key: [] for one in openings}
        for k, process in enumerate(self.processes):
            process.batches = [part] if (part := openings[k :: len(self.processes)]) else []
            self._next(process)

    def refs(self) -> list[Any]:
        return [process.generator for process in self.processes if process.generator is not None]

    def hear(self, ref: Any) -> Iterator[tuple[int, Asked | Played]]:
        """What the process behind a ready reference says, with the number of its call. Raises RunError when the budget for
        faults is used up."""
        process = next((p for p in self.processes if p.generator is ref), None)
        if process is None:  # replaced meanwhile
            return
        try:
            events = ray.get(next(process.generator))
        except StopIteration:
            self._next(process)
            return
        except GONE as error:
            yield from self._replaced(process, None, Cause.DIED, reason_of(error))
            return
        except RayTaskError as error:
            raise RunError(f"the agent's process failed: {reason_of(error)}") from error
        process.heard_s = time.monotonic()
        for event in events:
            if isinstance(event, Worked):
                process.core_s = event.core_s
                continue
            if isinstance(event, Stuck):
                why = f"the agent held its process for {event.seconds:.0f} s (agent.timeout_s = {self.timeout_s:g} s)"
                yield from self._replaced(process, event.key, Cause.HUNG, why)
                return
            if isinstance(event, Played):
                process.playing.pop(event.key, None)
            process.held.discard(event.key)
            yield process.epoch, event
        if not process.playing:  # nobody may listen when the call ends
            self._book(process)

    def answer(self, epoch: int, answers: Iterable[tuple[tuple[int, ...], Answered]]) -> None:
        """The policy's turns, each with its context, to the call that asked for them; if it is over they are kept."""
        process = next((p for p in self.processes if p.epoch == epoch), None)
        told = []
        for context, one in answers:
            said = self.said[one.key]
            if one.turn == len(said):
                said.append((context, one.reply))
            told.append(one)
            if process is not None and one.key in process.playing:
                process.held.add(one.key)
        if process is not None and told:
            process.heard_s = time.monotonic()
            process.actor.answer.options(concurrency_group="control").remote(epoch, told)

    def look(self) -> Iterator[tuple[int, Played]]:
        """Processes that hang where nothing reaches are ended."""
        for process in list(self.processes):
            silent = time.monotonic() - process.heard_s
            if process.generator is not None and process.held and silent > self.timeout_s + SILENT_S:
                yield from self._replaced(process, None, Cause.HUNG, f"nothing was heard of it for {silent:.0f} s")

    def _book(self, process: _Process) -> None:
        """What its call has taken of a core; of its first one, with the start."""
        if process.core_s > process.booked_s:
            node, taken_s = ray.get_runtime_context().get_node_id(), process.core_s - process.booked_s
            self.ledger.unleased("agent", process.id, node, process.began_s, time.time(), taken_s, "agents play")
            process.booked_s = process.core_s

    def _next(self, process: _Process) -> None:
        self._book(process)
        process.generator, process.playing, process.held = None, {}, set()
        if not process.batches:
            return
        batch = process.batches.pop(0)
        process.playing, process.epoch, process.alone = {one.key: one for one in batch}, next(_epochs), len(batch) == 1
        process.began_s = time.time() if process.booked_s else process.began_s
        process.held, process.heard_s = set(process.playing), time.monotonic() + self.deadline_s  # it may have to start first
        process.generator = process.actor.play.options(num_returns="streaming").remote(process.epoch, batch)

    def _replaced(self, process: _Process, key: int | None, cause: Cause, why: str) -> Iterator[tuple[int, Played]]:
        """Another process goes on with what this one had. `key`: of the episode at fault, where it is known."""
        self._book(process)
        ray.kill(process.actor, no_restart=True)
        self.replaced += 1
        if process.alone and key is None:
            key = next(iter(process.playing), None)
        left = [self._again(one) for one in process.playing.values() if one.key != key]
        suspects = [] if key is not None else [one for one in left if one.key in process.held]
        fresh = self._process()
        fresh.batches = [b for b in ([o for o in left if o not in suspects], *([o] for o in suspects)) if b] + process.batches
        self.processes[self.processes.index(process)] = fresh
        if key is not None:
            yield process.epoch, Played(key, f"the agent's process {cause.value} and was replaced: {why}")
        self.faults.count("the agent's process", cause, why)
        self._next(fresh)

    def _again(self, opening: Opening) -> Opening:
        return replace(opening, said=tuple(self.said[opening.key]))


def start_agent(cls: type, *arguments: Any, resource: str = "cpu") -> Any:
    """An actor on this node, without a slot: on GPU it sees no device, for all of them are others'."""
    remote: Any = ray.remote
    node = ray.get_runtime_context().get_node_id()
    return remote(concurrency_groups=cls.concurrency_groups)(cls).options(  # type: ignore[attr-defined]
        num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if resource == "gpu" else None,
    ).remote(*arguments)
