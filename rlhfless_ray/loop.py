"""The page: one step of GRPO, stage by stage.

    recipe → Prompt → Forecast → Plan → lease → prefix KV → rollout → reward → Advantage → learn → WeightVersion ↺

Each line is one stage and happens where it stands; stages do not call each other, the loop hands nouns from one to the next.
Two stages overlap others, both visibly: the next step is planned while the learner works, and its engines load the weights
while the driver writes the step down. What a stage does lies in the folder of its name, what it holds in `runtime/`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfless_ray.runtime.pipeline import Pipeline
from rlhfless_ray.types import Step


def plan_step(run: Pipeline, number: int) -> Step | None:
    """Plan a step; None after the last one."""
    if number > run.last_step:
        return None
    step = Step(number)
    step.prompts = run.next_prompts()
    step.forecast = run.forecast(step)
    step.plan = run.plan(step)
    step.prefixes = run.weigh_prefixes(step)
    return step


def steps(run: Pipeline) -> Iterator[Step]:
    """Train from the step after the last one done to the recipe's last; yields every finished step."""
    if run.owes_evaluation:  # the one before the first step, or one that a stop cut short
        run.record_evaluation(run.evaluate())
    step = plan_step(run, run.steps_done + 1)
    while step is not None:
        run.begin_step(step)
        step.prefixes = run.prefill(step)

        with run.rollout_phase(step.plan):  # scores, and accumulates gradients, on slots that engines have left
            step.samples = run.generate(step)
        with run.score_phase():
            run.score(step.samples)
        run.refill_groups(step)

        with run.learn_phase():
            batch = run.advantages(step.samples)
            update = run.start_update(batch)
            run.observe_samples(step)
            upcoming = plan_step(run, step.number + 1)  # while the learner works
            step.stats = update.result()
            run.weights = run.publish(step.number)

        if run.evaluation_is_due(step.number):
            step.evaluation = run.evaluate()
        end = run.decide_end(step, upcoming)
        step.ledger = run.close_step(step, end)
        if upcoming is not None and end.starts_next:
            run.start_engines(upcoming)  # they load the weights while the driver writes the step down
        run.record_step(step, end)
        yield step
        step = upcoming
    run.finish()
