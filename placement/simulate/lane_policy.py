"""Our step policy with lanes of wide engines, which the runtime does not have yet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.planning.lanes import MOST_LANES, LanePlan, lane_frontier
from placement.planning.objective import Objective, choose_nearest
from placement.planning.plan import Pool
from placement.simulate.elastic_policy import ROUGH_POLICY, elastic, ours, trial
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.plan_candidates import candidates, neighbours
from placement.simulate.plan_search import Planner
from placement.simulate.simulate_step import Lane, StepInput, StepPlanSettings, StepRun

LANES = "ours (lanes, not built)"
PREFERS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)  # points of the frontier whose lanes the search begins with
THIN = 0.02


def ours_with_lanes(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Run a step as `ours` does, where rollouts may also have a lane of one or two wider engines.

    Lanes are proposed by the frontier of engines of one width and with lanes, and searched on scenarios like every plan of
    a step. The plan of `ours` is one of those that are tried.
    """
    ours(times, given, planner)
    run, rough, tried = trial(times, "ours"), trial(times, ROUGH_POLICY), [planner.chosen["ours"]]
    if lanes := _with_lanes(times, planner):

        def nearby(plan: StepPlanSettings) -> list[StepPlanSettings]:
            return [near for near in (*_other_lanes(times, plan), *neighbours(times, plan)) if is_possible(times, near)]

        tried.append(planner.search(f"{LANES}: lane", run, rough, lanes, nearby))
    plan = planner.search(LANES, run, run, tried, lambda plan: [])
    return elastic(times, given, plan, name=LANES, expected=planner.expected)


def is_possible(times: PhaseTimes, plan: StepPlanSettings) -> bool:
    """Return whether the lane's engines are wider than the others and leave at least one of those, on all devices together."""
    lane = plan.lane
    assert lane is not None
    width = times.at(plan.width).width
    wider = lane.width > width and lane.width % width == 0
    room = lane.engines * lane.width // width < plan.engines <= times.at(plan.width).engines
    few = lane.started + lane.survivors < times.setting.prompts * times.setting.samples
    return wider and room and few and not plan.narrow and not plan.held and lane.started + lane.survivors > 0


def _with_lanes(times: PhaseTimes, planner: Planner) -> list[StepPlanSettings]:
    """Return the candidates with the lanes of the frontier's best plans."""
    given = planner.given
    pools = [
        Pool(replace(t.speed, prefill_s=t.prefill_s(1.0, 1)), max_actors=t.engines, capacity=t.capacity, devices=t.width)
        for t in times.widths
    ]
    found = lane_frontier(given.scenarios, pools, times.devices, prompts=given.prompts, thin=THIN)
    lanes = [plan for plan in found if isinstance(plan, LanePlan)]
    best = {id(plan): plan for prefer in PREFERS if lanes for plan in [choose_nearest(lanes, Objective(prefer=prefer)).plan]}
    tried = []
    for plan in best.values():
        narrow = next(pools[k].devices for k in plan.pools if k != plan.lane)
        wide = [group for group, k in zip(plan.groups, plan.pools, strict=True) if k == plan.lane]
        lane = Lane(pools[plan.lane].devices, max(1, len(wide)), int(np.sum([len(group) for group in wide])), plan.survivors)
        engines = max(times.devices // narrow // 2, plan.actors - len(wide) + lane.engines * lane.width // narrow)
        bases = [planner.chosen["ours"], *(k for k in candidates(times) if k.width == narrow)]
        tried += [replace(k, width=narrow, engines=engines, narrow=False, held=0, lane=lane) for k in bases]
    return [plan for plan in dict.fromkeys(tried) if is_possible(times, plan)]


def _other_lanes(times: PhaseTimes, plan: StepPlanSettings) -> list[StepPlanSettings]:
    """Return the plan with a lane that differs in one thing: width, engines, who starts in it, or who moves in."""
    lane = plan.lane
    assert lane is not None
    found = [replace(lane, width=t.width) for t in times.widths if t.width != lane.width]
    found += [replace(lane, engines=n) for n in range(1, MOST_LANES + 1) if n != lane.engines]
    found += [replace(lane, started=n) for n in (0, lane.started // 2, max(1, 2 * lane.started)) if n != lane.started]
    found += [replace(lane, survivors=n) for n in (0, lane.survivors // 2, max(1, 2 * lane.survivors)) if n != lane.survivors]
    return [replace(plan, lane=other) for other in dict.fromkeys(found)]
