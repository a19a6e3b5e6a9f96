"""Plans with lanes: one or two wide engines for the likely-long responses beside narrower engines for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.planning.frontier import frontier
from placement.planning.partition import pareto
from placement.planning.plan import Plan, Pool
from placement.planning.workload import ActorType, RolloutWorkload

MOST_LANES = 2  # engines of a lane: more of them would be a rollout of that width
SURVIVORS = (1, 2, 4, 8, 16, 32, 64)  # numbers of survivors that are tried
NARROW_PLANS = 12  # plans of each width whose survivors are tried


@dataclass(frozen=True)
class LanePlan(Plan):
    """A plan with engines of two widths. The lane is the engines of pool `lane`, the wider one.

    survivors: when no more than so many responses are left outside the lane, they move into its engine that has the least
    to do (0: none moves). Their contexts are computed again. That engine keeps its lease until then.
    """

    lane: int = 0
    survivors: int = 0

    def reason(self, pools: Sequence[Pool]) -> str:
        """Return the engines of both widths, and who decodes in the lane."""
        wide = [group for group, pool in zip(self.groups, self.pools, strict=True) if pool == self.lane]
        narrow = [pool for pool in self.pools if pool != self.lane]
        longest = sum(len(group) for group in wide)
        who = [f"{longest} likely-long response{'s' * (longest > 1)}"] if wide else []
        who += [f"the last {self.survivors} of the others"] if self.survivors else []
        lane = _engines(max(1, len(wide)), pools[self.lane].devices)
        return f"a lane of {lane} for {' and '.join(who)}, and {_engines(len(narrow), pools[narrow[0]].devices)} for the rest"


def _engines(count: int, devices: int) -> str:
    return f"{count} engine{'s' * (count > 1)} of {devices} slot{'s' * (devices > 1)}"


def lane_frontier(
    lengths: np.ndarray,
    pools: Sequence[Pool],
    slots: int,
    *,
    prompts: np.ndarray | float | None = None,
    transfer_s: float = 0.0,
    thin: float = 0.0,
) -> list[Plan]:
    """Find the plans that no other plan found beats, with engines of one width or with a lane.

    pools: one for each width, whose speeds differ. slots: devices that all engines of a plan may have together. The other
    arguments are those of `frontier`. `Plan.pools` counts in `pools`.

    Every plan that `frontier` finds for one width is a candidate, so no result is worse than without lanes. A width whose
    engines cannot hold the longest response is tried only beside a wider one.

    Raises ValueError as `frontier` does.
    """
    work = RolloutWorkload.from_arguments(lengths, pools=pools, prompts=prompts, transfer_s=transfer_s)

    def plans(*chosen: int, lanes: int = 0) -> list[Plan]:
        """Return the frontier over these pools: one of them, or a lane of at most `lanes` engines and a narrower one."""
        most = [slots // pools[chosen[0]].devices]
        if lanes:
            left = slots - lanes * pools[chosen[0]].devices
            most = [lanes, left // pools[chosen[1]].devices]
        limited = [replace(pools[k], max_actors=min(pools[k].max_actors, m)) for k, m in zip(chosen, most, strict=True)]
        found = frontier(lengths, pools=limited, prompts=prompts, transfer_s=transfer_s, thin=thin)
        return [replace(plan, pools=tuple(chosen[k] for k in plan.pools)) for plan in found]

    longest = work.held_tokens().max()
    alone = [k for k, pool in enumerate(pools) if pool.devices <= slots and work.kinds[k].capacity >= longest]
    single = {k: plans(k) for k in alone}
    found: list[Plan] = [plan for some in single.values() for plan in some]
    for wide, pool in enumerate(pools):
        for narrow, other in enumerate(pools):
            if other.devices >= pool.devices or wide not in alone:
                continue
            started = [
                LanePlan(plan.time_s, plan.cost, plan.groups, plan.pools, plan.search_scenarios, wide)
                for lanes in range(1, MOST_LANES + 1)
                if slots - lanes * pool.devices >= other.devices
                for plan in plans(wide, narrow, lanes=lanes)
                if len(set(plan.pools)) == 2
            ]
            found += started
            bases = [*_spread(single.get(narrow, [])), *_spread(pareto(started))]
            found += [moved for base in bases for count in SURVIVORS if (moved := with_survivors(work, base, wide, count))]
    return pareto(found, thin)


def _spread(plans: Sequence[Plan]) -> list[Plan]:
    """Return at most NARROW_PLANS plans, spread evenly."""
    return [plans[k] for k in sorted({*np.linspace(0, len(plans) - 1, NARROW_PLANS).astype(int).tolist()})] if plans else []


def with_survivors(work: RolloutWorkload, plan: Plan, lane: int, survivors: int) -> LanePlan | None:
    """Return the plan whose last `survivors` responses outside the lane move into it, timed in every scenario.

    lane: index of the lane's actor type. Returns None if there are no more responses than these outside, or if the lane
    cannot hold what moves in.
    """
    kind = work.kinds[lane]
    engines = [_Engine(work, work.kinds[pool], group) for group, pool in zip(plan.groups, plan.pools, strict=True) if pool != lane]
    wide = [_Engine(work, kind, group) for group, pool in zip(plan.groups, plan.pools, strict=True) if pool == lane]
    ends = np.sort(np.concatenate([engine.finish_s for engine in engines]), axis=0)
    if len(ends) <= survivors:
        return None
    at_s = ends[-survivors - 1]
    left, context = (np.concatenate(column) for column in zip(*[engine.left(at_s) for engine in engines], strict=True))
    begin_s, held_from_s = at_s + kind.setup_s, at_s
    again_s = kind.prefill_s * context.sum(0)
    if wide:
        receiver = wide.pop(int(np.argmin([engine.end_s.mean() for engine in wide])))
        begin_s, held_from_s = np.maximum(at_s, receiver.ready_s), np.zeros_like(at_s)
        own_left, own_context = receiver.left(at_s)
        left, context = np.concatenate((left, own_left)), np.concatenate((context, own_context))
    if (left + context).sum(0).max() > kind.capacity:
        return None
    decode_s = kind.base_s * left.max(0) + replace(kind, prefill_s=0.0).work_s(left, context).sum(0)
    end_s = begin_s + again_s + decode_s
    time_s = np.max([end_s, *(engine.end_s for engine in wide)], axis=0)
    cost = kind.price * (end_s - held_from_s + sum(engine.end_s for engine in wide))
    cost = cost + sum(engine.kind.price * np.minimum(engine.end_s, at_s) for engine in engines)
    return LanePlan(float(time_s.mean()), float(cost.mean()), plan.groups, plan.pools, plan.search_scenarios, lane, survivors)


class _Engine:
    """One engine's m sequences in all S scenarios, shortest first: when each ends, and what is left at a time.

    ready_s: (S,) or a number, seconds before its first decode step. finish_s: (m, S). end_s: (S,).
    """

    def __init__(self, work: RolloutWorkload, kind: ActorType, group: np.ndarray) -> None:
        rows = work.lengths[group]
        order = np.argsort(rows, axis=0, kind="stable")
        self.kind, self.lengths = kind, np.take_along_axis(rows, order, 0)
        self.prompts = work.prompts[group][order]
        count = len(group)
        self.done_s = np.cumsum(kind.work_s(self.lengths, self.prompts), axis=0)
        self.prompts_left = self.prompts.sum(0) - np.cumsum(self.prompts, axis=0)
        self.ready_s = kind.setup_s + kind.prefill_s * self.prompts[:, 0].sum()
        others = (count - 1 - np.arange(count))[:, None]
        each = kind.per_seq_s * self.lengths + kind.per_ctx_s * np.square(self.lengths) / 2
        more = (kind.per_ctx_s * self.lengths + kind.prefill_s) * self.prompts_left
        self.finish_s = kind.setup_s + kind.base_s * self.lengths + self.done_s + others * each + more
        self.end_s = self.finish_s[-1]

    def left(self, at_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens left and the contexts so far, each (m, S), at a time (S,) of each scenario. Ended sequences have 0."""
        kind, (count, scenarios) = self.kind, self.lengths.shape
        ended = (self.finish_s <= at_s).sum(0)
        column, last = np.arange(scenarios), np.maximum(ended - 1, 0)
        running = count - ended
        prompts = np.where(ended > 0, self.prompts_left[last, column], self.prompts.sum(0))
        over_s = at_s - kind.setup_s - np.where(ended > 0, self.done_s[last, column], 0.0) - kind.prefill_s * prompts
        rate, growth = kind.base_s + kind.per_seq_s * running + kind.per_ctx_s * prompts, kind.per_ctx_s * running / 2
        over_s = np.maximum(over_s, 0.0)  # before the first step no token is made
        made = 2 * over_s / (rate + np.sqrt(np.square(rate) + 4 * growth * over_s))
        live = np.arange(count)[:, None] >= ended
        return np.where(live, np.maximum(self.lengths - made, 0.0), 0.0), np.where(live, self.prompts + made, 0.0)
