"""The page: one step of GRPO, stage by stage.

    recipe → Prompt → Forecast → Plan → lease → prefix KV → rollout → reward → Advantage → learn → WeightVersion ↺

The session (`session/rollout_session.py`) holds the groups in flight. `admit` plans a step: its groups, the forecast of their lengths,
engines and shared prefixes. Under a lag it also generates the step's responses, beside the update. `take` generates what is missing of a
step's batch under the newest weights. During a rollout finished responses are scored, and gradients are accumulated on slots that engines
have left (`session/early_work.py`).

Stages do not import each other: the page passes values from one to the next. Forecast and plan are in the folder `autoscaler/`, leases in
`functions/`, scores in `reward/`, advantages in `learn/`, and weight versions in `weights/`. The other stages have a folder of their name.
`runtime/` connects them. A user may write another loop with the same verbs, see docs/own-loop.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfless_ray.runtime.run_parts import RunParts
from rlhfless_ray.step.step import Step


def steps(run: RunParts) -> Iterator[Step]:
    """Train the remaining steps of the recipe, and yield each one when it is finished."""
    session, updates = run.session, run.updates
    run.evaluations.make_up()  # before the first step, or interrupted by a stop
    step = session.admit()
    while step is not None:
        session.take(step)
        updates.score(step)
        with updates.phase(step):
            update = updates.start(updates.advantages(step))
            upcoming = session.admit()  # while the learner works
            updates.publish(update)
        run.evaluations.run(step)
        run.records.close(step)
        yield step
        step = upcoming
    run.records.finish()
