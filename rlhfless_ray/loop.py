"""The page: one step of GRPO, stage by stage.

    recipe → Prompt → Forecast → Plan → lease → prefix KV → rollout → reward → Advantage → learn → WeightVersion ↺

Each line is one stage. Stages do not import each other: the loop passes values from one to the next. Some stages overlap
others. During `generate` the rollout calls three neighbours through protocols (`rollout/neighbours.py`): it scores finished
responses and accumulates gradients on slots that engines have left, and sends prefix KV. The next step is planned while the
learner works, and its engines load the weights while the driver records the step. With `rollout.max_lag_steps` its responses
are generated while the learner works, under the weights from before the update. With `rollout.partial` a rollout ends when
enough groups are complete, and the other responses go on in the next step.
Forecast and plan are in the folder `autoscaler/`, leases in `functions/`, scores in `reward/`, advantages in `learn/`, and weight
versions in `weights/`. The other stages have a folder of their name. `runtime/` connects them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfless_ray.runtime.step_operations import StepOperations
from rlhfless_ray.step.step import Step


def plan_step(run: StepOperations, number: int) -> Step | None:
    """Plan a step. Returns None after the last one."""
    if number > run.last_step:
        return None
    step = Step(number)
    step.prompts = run.next_prompts(step)
    step.forecast = run.forecast(step)
    step.plan = run.plan(step)
    step.prefixes = run.weigh_prefixes(step)
    return step


def roll_out(run: StepOperations, step: Step) -> None:
    """Generate a step's responses under the newest weights."""
    step.prefixes = run.prefill(step)
    with run.rollout_phase(step.plan):  # also scores and accumulates gradients on slots that engines have left
        step.samples = run.generate(step)


def steps(run: StepOperations) -> Iterator[Step]:
    """Train the remaining steps of the recipe, and yield each one when it is finished."""
    if run.owes_evaluation:  # before the first step, or interrupted by a stop
        run.record_evaluation(run.evaluate())
    step = plan_step(run, run.steps_done + 1)
    while step is not None:
        run.begin_step(step)
        if not run.has_responses(step):  # otherwise they were generated while the learner worked
            roll_out(run, step)
        with run.score_phase():
            run.score(step.samples)
        run.refill_groups(step)

        with run.learn_phase():
            batch = run.advantages(step.samples)
            update = run.start_update(batch)
            run.observe_samples(step)
            upcoming = plan_step(run, step.number + 1)  # while the learner works
            if upcoming is not None and run.rolls_out_ahead:
                roll_out(run, upcoming)  # one step off: the weights of this update come too late for it
            step.stats = update.result()
            run.weights = run.publish(step.number)
        if upcoming is not None:
            run.plan_rest(upcoming)  # partial rollouts beside the update go on under its weights

        if run.evaluation_is_due(step.number):
            step.evaluation = run.evaluate()
        end = run.decide_end(step, upcoming)
        step.ledger = run.close_step(step, end.starts_next)
        if upcoming is not None and end.starts_next:
            run.start_engines(upcoming)  # they load the weights while the driver records the step
        run.record_step(step, end)
        yield step
        step = upcoming
    run.finish()
