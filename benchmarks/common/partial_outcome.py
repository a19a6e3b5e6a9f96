"""What is wrong with a replayed run of partial rollouts, by its recorded orders of completion: nothing may be lost, twice or too old."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from benchmarks.common.fault_injection import outcome, step_rows
from benchmarks.common.replay import Script
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.step.requests import make_request
from rlhfless_ray.types import Prompt, SampleId


def trained_groups(path: Path, step: int) -> list[tuple[int, int]]:
    """(row, step in which it was begun) of each group that the step trained."""
    for name in (f"order_{step}.json", f"order_{step}_ahead.json"):
        file = path / "samples" / name
        if file.exists() and (order := json.loads(file.read_text()))["trained"] is not None:
            return [tuple(order["groups"][g]) for g in order["trained"]]
    return []


def wrong_of(path: Path, recipe: Recipe) -> dict[str, int]:
    """Count what is wrong. A response has the length of its script only if no token of it was lost or drawn twice."""
    run = Runtime(recipe)
    script = Script.read({file.name: file.read_bytes() for file in Path(recipe.policy.path).iterdir() if file.suffix == ".json"})
    prompts: list[Prompt] = run.inputs.prompts.train
    quota, count, bound = recipe.prompts.batch_prompts, recipe.rollout.samples_per_prompt, recipe.rollout.max_lag_steps
    expected, found = Counter(run.inputs.cursor.next(recipe.run.steps * quota)), Counter[int]()
    of_other_length = too_old = 0
    for step, rows in outcome(path).items():
        groups = trained_groups(path, step)
        found.update(row for row, _ in groups)
        for place, (row, _, _, tokens, _) in enumerate(rows):
            prompt, begun = groups[place // count] if place // count < len(groups) else (row, step)
            length = script.length(make_request(recipe, 0, prompts[prompt], 1.0, SampleId(prompt, begun, place % count)))
            of_other_length += prompt != row or tokens != length
            too_old += step - begun > bound
    return {
        "groups lost": sum((expected - found).values()),
        "groups twice": sum((found - expected).values()),
        "responses of another length": of_other_length,
        "responses beyond the bound": too_old,
        "steps beyond the bound": sum(row["lag/max"] > bound for row in step_rows(path)),
    }
