"""Choose how many slots the calls of a step's learn phase get, and whether they run side by side or take turns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from placement.calls import StepGraph


@dataclass(frozen=True)
class CallOptions:
    """What is known of a call: its ranks, and its seconds by the number of slots that each rank has."""

    ranks: int
    seconds: Mapping[int, float]


@dataclass(frozen=True)
class CallPlan:
    """How calls run. `slots`: of each rank, by call. `together`: calls start as soon as there are slots; otherwise they take turns."""

    slots: Mapping[str, int]
    together: bool
    seconds: float = 0.0
    slot_seconds: float = 0.0
    reason: str = ""

    def value(self, value_per_s: float) -> float:
        """Return the cost of the calls, with their seconds at their worth."""
        return self.slot_seconds + value_per_s * self.seconds


def choose_call_slots(graph: StepGraph, options: Mapping[str, CallOptions], room: int, value_per_s: float, *, together: bool) -> CallPlan:
    """Return the plan of least cost for these calls of the graph; the others have ended.

    Parameters
    ----------
    room : int
        Slots that the calls may hold at the same time. A call that needs more runs alone.
    value_per_s : float
        Worth of a second, in slot-seconds.
    """
    plans = []
    for counts in itertools.product(*(sorted(one.seconds) for one in options.values())):
        slots = dict(zip(options, counts, strict=True))
        seconds = {name: options[name].seconds[count] for name, count in slots.items()}
        held = {name: options[name].ranks * count for name, count in slots.items()}
        total = _makespan_s(graph, seconds, held, room) if together else sum(seconds.values())
        plans.append(CallPlan(slots, together, total, sum(held[name] * seconds[name] for name in slots)))
    return min(plans, key=lambda plan: (plan.value(value_per_s), sum(plan.slots.values())))


def _makespan_s(graph: StepGraph, seconds: Mapping[str, float], held: Mapping[str, int], room: int) -> float:
    """Return the time of calls that start in order of the graph, each as soon as its needs have ended and its slots are free."""
    now, free = 0.0, room
    ended = {call.name for call in graph.calls} - seconds.keys()
    running: dict[str, float] = {}  # call → its end
    while len(ended) < len(graph.calls):
        for call in graph.ready(ended, ended | running.keys()):
            if call.name in seconds and (held[call.name] <= free or not running):
                running[call.name], free = now + seconds[call.name], free - held[call.name]
        first = min(running, key=running.__getitem__)
        now, free = running.pop(first), free + held[first]
        ended.add(first)
    return now
