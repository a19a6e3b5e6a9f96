"""The page: one step of GRPO, stage by stage.

    recipe → Prompt → Forecast → Plan → lease → prefix KV → rollout → reward → Advantage → learn → WeightVersion ↺

Each line is one stage; stages do not call each other, the loop hands nouns from one to the next. What a stage does lies in
the folder of its name, what it holds (pools, leases, ledger) in `runtime.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhfless_ray.types import Step

if TYPE_CHECKING:
    from rlhfless_ray.runtime import Runtime


def steps(run: Runtime) -> Iterator[Step]:
    """Train from the step after the last one done to the recipe's last; yields every finished step."""
    if run.owes_evaluation:  # the one before the first step, or one that a stop cut short
        run.record_evaluation(run.evaluate())
    for number in run.numbers():
        step = run.begin_step(number)

        step.prompts = run.next_prompts(step)
        step.forecast = run.forecast(step)
        step.plan = run.plan(step)
        step.prefixes = run.prefill(step)

        with run.rollout_phase(step.plan):
            step.samples = run.generate(step)
        with run.score_phase():
            run.score(step.samples)
        run.refill_groups(step)

        with run.learn_phase():
            batch = run.advantages(step.samples)
            step.stats = run.update(batch)
            run.weights = run.publish(number)

        if run.evaluation_is_due(number):
            step.evaluation = run.evaluate()
        step.ledger = run.end_step(step)
        yield step
    run.finish()
