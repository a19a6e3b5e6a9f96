"""Schedule the calls of a step on slots: which runs when, and in which layout.

A schedule is made of a list of the calls, with an option for each. Every call starts as early as its needs, its model, the slots and the
memory of a node allow, but not before the call ahead of it in the list. On one node some list gives the best schedule: sort the calls of
the best one by their starts, and none of them starts later by its list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from placement.calls import Call, StepGraph
from placement.layouts import Layout

MEMORY_UNITS = 64  # a node's memory is divided into as many parts, and a call takes whole ones: up to 1.6 % too much


@dataclass(frozen=True)
class Option:
    """One way to run a call: in this layout it takes `seconds`. `node_bytes`: memory that it needs of each node while it runs."""

    layout: Layout
    seconds: float
    node_bytes: float = 0.0

    @property
    def slot_seconds(self) -> float:
        return self.layout.slots * self.seconds


def no_change(before: Call, had: Layout, call: Call, has: Layout) -> float:
    return 0.0


@dataclass(frozen=True)
class Problem:
    """What a search decides about.

    Parameters
    ----------
    graph : StepGraph
        The calls.
    options : mapping
        The options of each call, by its name.
    nodes, slots_per_node : int
        Slots of a node are interchangeable. A layout of several nodes has whole ones.
    node_bytes : float
        Memory of a node for calls that run.
    change_s : callable
        Seconds that a call takes longer after the model's previous call in the step, by both layouts: resharding of its weights.

    Raises
    ------
    ValueError
        If a call has no option that could run alone.
    """

    graph: StepGraph
    options: Mapping[str, Sequence[Option]]
    nodes: int
    slots_per_node: int
    node_bytes: float = math.inf
    change_s: Callable[[Call, Layout, Call, Layout], float] = no_change

    def __post_init__(self) -> None:
        for call in self.graph.calls:
            if not self.options.get(call.name) or not all(map(self.fits, self.options[call.name])):
                raise ValueError(f"call {call.name}: it needs options that fit {self.nodes} nodes of {self.slots_per_node} slots")

    @property
    def slots(self) -> int:
        return self.nodes * self.slots_per_node

    def fits(self, option: Option) -> bool:
        """Return whether a call with this option could run alone."""
        slots, most = option.layout.slots, self.slots_per_node
        return (slots <= most or (slots % most == 0 and slots <= self.slots)) and option.node_bytes <= self.node_bytes


@dataclass(frozen=True)
class Schedules:
    """Many schedules of n calls: R of them. Calls are numbered as in the graph.

    seconds, slot_seconds (R,): of the step. starts, ends (R, n): of each call. nodes (R, n, nodes): whether the call is on a node.
    """

    seconds: np.ndarray
    slot_seconds: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    nodes: np.ndarray


class Scheduler:
    """Computes many schedules of a problem at once."""

    def __init__(self, problem: Problem) -> None:
        calls, self.problem = problem.graph.calls, problem
        self.options = [sorted(problem.options[call.name], key=lambda option: option.layout.slots) for call in calls]
        shape = (len(calls), max(map(len, self.options)))
        self.seconds, self.slots, self.units = np.full(shape, np.inf), np.ones(shape, int), np.zeros(shape, int)
        for number, options in enumerate(self.options):
            for at, option in enumerate(options):
                self.seconds[number, at], self.slots[number, at] = option.seconds, option.layout.slots
                self.units[number, at] = math.ceil(MEMORY_UNITS * option.node_bytes / problem.node_bytes - 1e-9)
        self.needs = np.array([[other.name in call.needs for other in calls] for call in calls])
        self.same = np.array([[other is not call and other.model is call.model for other in calls] for call in calls])

    @cached_property
    def changes(self) -> np.ndarray:
        """(n, n, options, options) seconds that a call takes longer after another one of its model, by the options of both."""
        found = np.zeros((*self.same.shape, self.seconds.shape[1], self.seconds.shape[1]))
        for number, before in zip(*np.nonzero(self.same), strict=True):
            call, last = self.problem.graph.calls[number], self.problem.graph.calls[before]
            for at, option in enumerate(self.options[number]):
                for earlier, other in enumerate(self.options[before]):
                    found[number, before, at, earlier] = self.problem.change_s(last, other.layout, call, option.layout)
        return found

    def run(self, orders: np.ndarray, choices: np.ndarray) -> Schedules:
        """Compute the schedules of R lists. orders (R, n): calls, each after those that it needs. choices (R, n): option of each call."""
        problem, rows, n = self.problem, np.arange(len(orders)), orders.shape[1]
        free = np.zeros((len(rows), problem.nodes, problem.slots_per_node))  # when each slot of a node is free, ascending
        room = np.zeros((len(rows), problem.nodes, MEMORY_UNITS)) if self.units.any() else None
        starts, ends, spent, begun = np.zeros((len(rows), n)), np.zeros((len(rows), n)), np.zeros(len(rows)), np.zeros(len(rows))
        nodes = np.zeros((len(rows), n, problem.nodes), bool)
        for call in orders.T:
            chosen = choices[rows, call]
            slots, seconds = self.slots[call, chosen], self.seconds[call, chosen]
            if self.changes.any():
                of_model = np.where(self.same[call], ends, 0.0)
                before = of_model.argmax(1)
                seconds = seconds + np.where(of_model.any(1), self.changes[call, before, chosen, choices[rows, before]], 0.0)
            ready = np.maximum(begun, np.where(self.needs[call] | self.same[call], ends, 0.0).max(1))
            each, count = np.minimum(slots, problem.slots_per_node), -(-slots // problem.slots_per_node)
            there = free[rows, :, each - 1]
            units = self.units[call, chosen]
            if room is not None:
                there = np.maximum(there, np.where(units[:, None] > 0, room[rows, :, units - 1], 0.0))
            begun = np.maximum(ready, np.sort(there, 1)[rows, count - 1])
            counts = (free <= begun[:, None, None]).sum(2)
            # the fullest of the nodes that have room: it leaves the others to calls that need more
            rank = np.argsort(np.argsort(np.where(there <= begun[:, None], counts, problem.slots + 1), axis=1, kind="stable"), axis=1)
            on = rank < count[:, None]
            starts[rows, call], nodes[rows, call] = begun, on
            ends[rows, call] = until = begun + seconds
            spent += slots * seconds
            _take(free, counts, each, on, until)
            if room is not None:
                _take(room, (room <= begun[:, None, None]).sum(2), units, on, until)
        return Schedules(ends.max(1), spent, starts, ends, nodes)

    def least(self, choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return lower bounds (R,) of the seconds and slot-seconds of all schedules with these options (R, n)."""
        numbers = np.arange(choices.shape[1])
        seconds, slots = self.seconds[numbers, choices], self.slots[numbers, choices]
        ends = np.zeros_like(seconds)
        for number in numbers:
            ends[:, number] = seconds[:, number] + ends[:, self.needs[number]].max(1, initial=0.0)
        by_model = [seconds[:, number] + seconds[:, self.same[number]].sum(1) for number in numbers]
        work = slots * seconds
        alone = np.where(2 * slots > self.problem.slots, seconds, 0.0).sum(1)  # no two of these run side by side
        return np.maximum.reduce([ends.max(1), *by_model, work.sum(1) / self.problem.slots, alone]), work.sum(1)


def _take(free: np.ndarray, counts: np.ndarray, each: np.ndarray, on: np.ndarray, until: np.ndarray) -> None:
    """Occupy `each` (R,) of the `counts` (R, nodes) free parts of the nodes `on`, those that were free last, until a time (R,)."""
    place = np.arange(free.shape[2])
    taken = on[:, :, None] & (place >= (counts - each[:, None])[:, :, None]) & (place < counts[:, :, None])
    free[...] = np.where(taken, until[:, None, None], free)
    free.sort(axis=2)
