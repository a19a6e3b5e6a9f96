"""A rollout on engines of two widths at once: a lane of wide engines beside the narrower ones."""

from __future__ import annotations

import numpy as np

from placement.simulate.narrowing import Narrowed, Narrowing
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.rollout.decoding import ActorLease, VirtualEngines
from placement.simulate.rollout.run_policy import Result, make_view
from placement.simulate.rollout.view import RolloutJob
from placement.simulate.simulate_step import DECISION_SHARE, Lane, SimulatedRollout, StepInput, on_clock

SPREADS = 2.0  # standard deviations in the key by which the likely-long are found, as in the planner
LEFT = -2  # home of a sequence whose KV was lost: wherever it goes on, it moves


def roll_out_with_lane(
    wide: PhaseTimes,
    lane: Lane,
    times: PhaseTimes,
    given: StepInput,
    policy: str,
    *,
    engines: int,
    prefer: float,
    capacity: int | None = None,
    transfer_s: float | None = None,
    wake_s: float | None = None,
    narrowings: tuple[Narrowing, ...] = (),
) -> SimulatedRollout:
    """Simulate the rollout of a step as `roll_out` does, with a lane.

    wide: times at the lane's width. engines: limit on all engines, in narrow ones. A lease of the lane is returned as leases
    of as many narrow engines as it has devices for, with negative actors. A lane that opens for survivors always waits
    until it has woken.

    The likely longest begin in the lane and stay there. The named policy decides about all others. When no more than
    `lane.survivors` of those are left, all of them move into the lane's last engine. It computes their contexts again,
    and its own responses wait for that.
    """
    assert not narrowings, "a rollout with a lane gives no engines up"
    start = (times.wake_s if wake_s is None else wake_s) + (times.reshard_s if transfer_s is None else transfer_s)
    key = (policy, times.width, engines, prefer, capacity, start, lane)
    if key not in given.cache:
        scenarios = given.lengths[:, None] if policy == "oracle" else given.scenarios
        order = np.argsort(-(scenarios.mean(1) + SPREADS * scenarios.std(1)), kind="stable")
        inside, outside = order[: lane.started], np.sort(order[lane.started :])
        share = wide.width // times.width
        job = RolloutJob(
            scenarios[outside],
            times.speed,
            max(1, min(engines - lane.engines * share * bool(lane.started), len(outside))),
            prefer,
            times.migrate_s,
            start,
            given.prompts[outside],
            capacity or times.capacity,
            DECISION_SHARE * (4 if given.is_trial else 1) * times.setting.response_limit * times.speed.base_s,
            given.seed,
            np.unique(given.group[outside], return_inverse=True)[1],
        )
        model = times.setting.model
        room = int(min(wide.capacity, job.capacity * share * model.kv_bytes(times.width) / model.kv_bytes(wide.width)))  # type: ignore[operator]
        opens_s = start if lane.started else wide.wake_s + wide.reshard_s
        broad = VirtualEngines(given.lengths, given.prompts, wide.speed, opens_s, 0.0, room)
        narrow = _run(broad, job, Narrowed(policy, job, ()), given, lane, inside, outside)
        _move_in(broad, narrow, wide, lane, outside)
        leases = (*narrow.leases, *(ActorLease(-1 - k.actor, k.from_s, k.to_s) for k in broad.leases for _ in range(share)))
        cost = float(sum(lease.to_s - lease.from_s for lease in leases))
        result = Result(broad.time_s, cost, leases, broad.finish_s, narrow.moves + broad.moves, ())
        given.cache[key] = on_clock(times, given, result, start)
    return given.cache[key]


def _run(
    broad: VirtualEngines, job: RolloutJob, policy: Narrowed, given: StepInput, lane: Lane, inside: np.ndarray, outside: np.ndarray
) -> VirtualEngines:
    """Decode in both widths until no more than the survivors are left outside the lane. Returns the narrow engines."""
    narrow = VirtualEngines(given.lengths[outside], job.prompts, job.speed, job.start_s, job.migrate_s, job.capacity)
    if lane.started:
        actor = np.full(len(given.lengths), -1)
        actor[inside] = np.arange(len(inside)) % lane.engines
        broad.place(actor, frozenset({lane.engines - 1} if lane.survivors else ()))
    while (~narrow.finished).sum() > lane.survivors:
        at = narrow.time_s
        action = policy.decide(make_view(narrow, job))
        if action is not None:
            narrow.place(action.actor, action.hold)
        narrow.advance(at + job.interval_s)
        broad.advance(narrow.time_s)
    narrow.finish()
    return narrow


def _move_in(broad: VirtualEngines, narrow: VirtualEngines, wide: PhaseTimes, lane: Lane, outside: np.ndarray) -> None:
    """Move the survivors of the narrow engines into the lane, and decode everything to its end."""
    ended, left = outside[narrow.finished], outside[~narrow.finished]
    broad.generated[outside] = narrow.generated
    broad.finished[ended], broad.finish_s[ended] = True, narrow.finish_s[narrow.finished]
    if len(left):
        target, actor = lane.engines - 1, broad.actor.copy()
        again_s = wide.prefill_s(float((broad.prompts + broad.generated)[left].sum()), 1)
        own = ~broad.finished & (actor == target)
        broad.paused_until[own] = np.maximum(broad.paused_until[own], broad.time_s + again_s)
        actor[left], broad.home[left] = target, LEFT
        setting = wide.setting
        broad.migrate_s = setting.migrate_scale * setting.phases["migration_pause_s"] + again_s
        broad.place(actor, frozenset())
    else:
        broad.place(broad.actor, frozenset())
    broad.advance(np.inf)
    broad.finish()
