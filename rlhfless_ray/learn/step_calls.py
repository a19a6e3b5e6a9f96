"""The calls of a step's learn phase: plan them, run them, and measure what they took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from placement.calls import OLD, TRAIN_CRITIC, TRAIN_POLICY, Features, in_turn, step_graph
from placement.execution_plan import ExecutionPlan
from placement.scaling.resize_policy import Decision
from rlhfless_ray.autoscaler.call_planner import CallToPlan
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.call_runner import CallRunner, CallTime, GroupCall
from rlhfless_ray.learn.colocation import ColocatedGroups
from rlhfless_ray.learn.logprob_passes import StepPasses
from rlhfless_ray.learn.rank_settings import RankLayout
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Sample

Starts = dict[str, tuple[WorkerGroup, Callable[[], Pending[Any]]]]  # call → its worker group, and the function that starts it


class StepCalls:
    def __init__(self, context: RunContext, groups: ColocatedGroups, passes: StepPasses, kl_in_reward: bool) -> None:
        self.context, self.groups, self.passes = context, groups, passes
        features = Features(
            values=groups.critic is not None,
            reference=groups.reference is not None,
            pass_before=passes.logprobs is not None,
            kl_in_reward=kl_in_reward,
        )
        self.graph = step_graph(features)
        self.runner = CallRunner(groups, self.graph)
        self.plan: ExecutionPlan | None = None  # of the phase that runs; None if the learner is the only worker group
        self.planned: tuple[dict[str, CallToPlan], Decision, int] | None = None  # what it is made of
        self.tokens: dict[str, float] = {}  # of each planned call
        self.callers: dict[str, WorkerGroup] = {}  # of each call
        self.times: dict[str, CallTime] = {}  # of the calls of the step that have ended

    # ---- the plan ---------------------------------------------------------------------------------------------

    def begin(self, samples: Sequence[Sample], decision: Decision, wanted: Sequence[str]) -> None:
        """Plan the phase of a step with these samples. `decision`: of the policy's update. `wanted`: the passes that it needs."""
        self.times, self.plan, self.planned, self.groups.update_slots = {}, None, None, 0
        if self.groups.alone:
            return
        found = {kind.call: (kind.worker_group, [one for one in samples if one.id not in kind.known]) for kind in self.passes.each}
        calls = {name: self._planned(*of) for name, of in found.items() if name in wanted and of[1]}
        updates = {TRAIN_CRITIC: self.groups.critic, TRAIN_POLICY: self.groups.learner}
        calls |= {name: self._planned(group, samples) for name, group in updates.items() if group is not None}
        self.callers = {kind.call: kind.worker_group for kind in self.passes.each} | {n: g for n, g in updates.items() if g is not None}
        self.tokens = {name: call.tokens for name, call in calls.items()}
        self.planned = calls, decision, self._room()
        self.plan = self.context.autoscaler.calls.plan(self.graph, *self.planned)
        self.groups.learner.slots = self._slots(TRAIN_POLICY, self.groups.learner)
        if self.groups.critic is not None and self.plan.has_beside(TRAIN_CRITIC, TRAIN_POLICY):
            self.groups.update_slots = self._slots(TRAIN_CRITIC, self.groups.critic)

    def search(self, layouts: Mapping[int, Mapping[str, RankLayout]]) -> None:
        """Search the plan of the next phase, while the updates work, and what its calls take on other numbers of ranks.

        `layouts`: of each worker group, by the learner's ranks.
        """
        if self.planned is None:
            return
        planner, (calls, decision, room) = self.context.autoscaler.calls, self.planned
        planner.search(self.graph, calls, decision, room)
        on_ranks = {
            ranks: {name: replace(call, ranks=of_groups[self.callers[name].name].ranks) for name, call in calls.items()}
            for ranks, of_groups in layouts.items()
        }
        planner.price_ranks(self.graph, on_ranks, room)

    def _planned(self, group: WorkerGroup, samples: Sequence[Sample]) -> CallToPlan:
        return CallToPlan(group.ranks, float(sum(len(one.completion.token_ids) for one in samples)))

    def _room(self) -> int:
        """Return how many slots the run may hold for all worker groups together. Working engines keep theirs."""
        leases, groups = self.context.leases, self.groups
        own = len(self.context.broker.free) + sum(len(i.leases) for group in groups.all for i in group.by_rank)
        if leases.resource == "gpu":  # each rank stays on its device
            return len({place for group in groups.all for instance in group.by_rank for place in instance.slot.places})
        if groups.shares_slots:
            return own
        room = sum(leases.nodes.slots({}).values()) - (len(leases.held) - own)
        bids = self.context.autoscaler.criteria.bids
        return room if bids is None else max(own, min(room, bids.pool.view.target))

    def _slots(self, name: str, group: WorkerGroup) -> int:
        """Return the slots that a call gets for all ranks."""
        layouts = self.plan.layouts if self.plan is not None and self.context.leases.resource == "cpu" else {}
        return group.ranks * layouts[name].threads if name in layouts else group.slots

    # ---- the calls --------------------------------------------------------------------------------------------

    def run_passes(self, samples: Sequence[Sample], batch: Batch, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        """Return values by name, per response token of `batch`, which consists of these samples. Computes what is missing."""
        kinds = {kind.call: kind for kind in self.passes.each if kind.call in wanted}
        starts: Starts = {
            name: (kind.worker_group, partial(kind.start, samples, batch)) for name, kind in kinds.items() if kind.lacks(samples)
        }
        if starts:
            self.start(starts)
        results = self.finish() if starts else {}
        return {
            of: values
            for name, kind in kinds.items()
            for of, values in (results[name] if name in results else kind.start(samples, batch).result()).items()
        }

    def start(self, starts: Starts) -> None:
        """Start calls, see `CallRunner.start`."""
        calls = {name: GroupCall(group, self._slots(name, group), begin) for name, (group, begin) in starts.items()}
        self.runner.start(calls, in_turn(self.graph) if self.plan is None else self.plan.graph)

    def finish(self) -> dict[str, Any]:
        """Wait for the calls that were started. Returns their results by name."""
        results = self.runner.finish()
        self.times |= self.runner.times
        return results

    # ---- measurements -----------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Have the autoscaler record the step's calls, unless ranks were lost in one, or the policy is frozen."""
        if self.plan is None or any(one.lost for one in self.times.values()) or self.times.keys() != self.plan.layouts.keys():
            return
        took = {name: (one.slots, one.seconds) for name, one in self.times.items()}
        self.context.autoscaler.calls.observe(self.plan, self.tokens, took, union_s(list(self.times.values())))

    def after_policy_s(self) -> float:
        """Return the seconds for which the critic's update went on after the policy's."""
        critic, policy = self.times.get(TRAIN_CRITIC), self.times.get(TRAIN_POLICY)
        return 0.0 if critic is None or policy is None else max(0.0, critic.end_s - policy.end_s)

    def metrics(self) -> JsonObject:
        """Return seconds of each call, what its prediction missed, seconds of calls beside others, and the plan beside what happened.

        Empty if the learner is the only worker group. `plan/calls`: of each call its name, slots, and start and end in seconds, as planned
        and as measured.
        """
        if self.plan is None or not self.times:
            return {}
        took = {f"learn/call_s/{name.replace(' ', '_')}": one.seconds for name, one in self.times.items()}
        overlap_s = sum(took.values()) - union_s(list(self.times.values()))
        first_s = min(one.start_s for one in self.times.values())
        known = {one.call: one for one in self.plan.calls if one.call in self.times and one.end_s > one.start_s}
        missed = {
            f"learn/call_error/{name.replace(' ', '_')}": self.times[name].seconds / (one.end_s - one.start_s) - 1
            for name, one in known.items()
        }
        calls = [
            [name, one.layout.slots, one.start_s, one.end_s, self.times[name].start_s - first_s, self.times[name].end_s - first_s]
            for name, one in known.items()
        ]
        return {**took, **missed, "learn/overlap_s": overlap_s, "plan/calls": calls}


def union_s(times: Sequence[CallTime]) -> float:
    """Return the seconds in which any of these calls ran."""
    total, until_s = 0.0, -float("inf")
    for one in sorted(times, key=lambda one: one.start_s):
        total += max(0.0, one.end_s - max(one.start_s, until_s))
        until_s = max(until_s, one.end_s)
    return total


def passes_wanted(passes: StepPasses, needs_old: bool) -> list[str]:
    """Return the passes that a learn phase makes. The learner's is part of its update, unless its values are needed or known before."""
    early = needs_old or (passes.logprobs is not None and bool(passes.logprobs.known))
    return [kind.call for kind in passes.each if kind.call != OLD or early]
