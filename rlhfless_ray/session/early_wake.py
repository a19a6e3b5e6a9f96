"""Wake the next step's engines on slots that the learner leaves free, shortly before its update ends."""

from __future__ import annotations

import time

from rlhfless_ray.common.pending import Pending
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.types import UpdateStats

LOOK_S = 0.02  # interval of looking whether the update has ended, which a look costs a tenth of a millisecond


def wake_early(session: RolloutSession, update: Pending[UpdateStats], saves: bool) -> None:
    """Wait until it is time, and wake engines of the admitted step while the learner still works. The step's metrics say what came of it.

    They take their slots and prepare their memory, so that they only have to load the weights once these are published. Engines for which
    only the learner's own slots are left cannot wake before it has ended: on GPU their KV cache takes what it needs.

    `saves`: whether a checkpoint is saved before the next rollout.
    """
    step, stage, autoscaler = session.upcoming, session.stage, session.context.autoscaler
    if step is None:
        return
    missing = stage.count_missing(step.plan)
    if reason := _obstacle(session, saves, missing):
        step.metrics["rollout/wake_reason"] = reason
        return
    when = autoscaler.steps.time_wake(session.update_ends_s - time.monotonic(), missing * stage.pool.width)
    if when is None:
        return
    is_taken = autoscaler.steps.takes("early_wake", ahead=True)
    step.metrics["rollout/wake_reason"] = f"{when.reason}; {'taken' if is_taken else 'left out'}, {autoscaler.terms.early_wake.reason}"
    if not is_taken:
        return
    at_s = time.monotonic() + when.at_s
    while (wait_s := at_s - time.monotonic()) > 0 and not update.is_ready():
        time.sleep(min(LOOK_S, wait_s))
    if not update.is_ready():
        began_s = time.monotonic()
        step.metrics["rollout/woken_early"] = stage.wake(step.plan)
        step.metrics["rollout/woke_early_s"] = max(0.0, session.update_ends_s - began_s)


def _obstacle(session: RolloutSession, saves: bool, missing: int) -> str:
    """Return why no engine of the admitted step wakes early, or "" if some may."""
    step = session.upcoming
    assert step is not None
    if session.mode.begins_beside_update:
        return "engines work beside the update"
    if not session.context.recipe.functions.elastic:
        return "functions.elastic is off"
    if session.context.autoscaler.criteria.bids is not None:
        return "slots of a shared pool come for the bids of a phase"
    if saves:
        return "a checkpoint comes first"
    if step.samples or step.batch.is_complete:
        return "the responses are there already"
    if step.computes_prefixes:
        return "shared prefixes are computed first"
    if not missing:
        return "all engines take slots that the learner holds"
    return "" if session.context.autoscaler.predictor.expected_update_s else "no update was measured yet"
