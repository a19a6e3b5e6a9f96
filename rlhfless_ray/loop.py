"""The page: one step of GRPO, stage by stage.

    recipe → Prompt → Forecast → Plan → lease → prefix KV → rollout → reward → Advantage → learn → WeightVersion ↺

The session (`session/rollout_session.py`) holds the groups in flight. `admit` plans a step: its groups, the forecast of their lengths,
engines and shared prefixes. Under a lag it also generates the step's responses, beside the update. `take` generates what is missing of a
step's batch under the newest weights. During a rollout finished responses are scored, and gradients are accumulated on slots that engines
have left (`session/early_work.py`).

Stages do not import each other: the page passes values from one to the next. Forecast and plan are in the folder `autoscaler/`, leases in
`functions/`, scores in `reward/`, advantages in `learn/`, and weight versions in `weights/`. The other stages have a folder of their name.
`runtime/` connects them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfless_ray.runtime.step_operations import StepOperations
from rlhfless_ray.step.step import Step


def steps(run: StepOperations) -> Iterator[Step]:
    """Train the remaining steps of the recipe, and yield each one when it is finished."""
    session = run.session
    if run.owes_evaluation:  # before the first step, or interrupted by a stop
        run.record_evaluation(run.evaluate())
    step = session.plan(run.steps_done + 1)
    while step is not None:
        run.begin_step(step)
        session.take(step)
        run.score(step)

        with run.learn_phase():
            update = run.start_update(run.advantages(step.samples))
            run.observe_samples(step)
            upcoming = session.admit(step.number + 1)  # while the learner works
            step.stats = update.result()
            run.weights = run.publish(step.number)
        if upcoming is not None:
            session.switch(upcoming)  # what the update has cut goes on under its weights

        if run.evaluation_is_due(step.number):
            step.evaluation = run.evaluate()
        end = run.decide_end(step, upcoming)
        step.ledger = run.close_step(step, end.starts_next)
        if upcoming is not None and end.starts_next:
            session.start_engines(upcoming)  # they load the weights while the driver records the step
        run.record_step(step, end)
        yield step
        step = upcoming
    run.finish()
