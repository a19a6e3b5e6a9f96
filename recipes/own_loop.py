"""A training loop of your own: prompts that are neither too easy nor too hard, and a small bonus for short responses.

    python recipes/own_loop.py                       # the quickstart's task, policy and settings
    python recipes/own_loop.py run.steps=10 run.seed=1

It keeps all that a run has: the planner, elastic engines, the ledger, checkpoints, replaced processes and the report.
docs/own-loop.md explains each verb and what may be changed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlhfless_ray import Recipe, RunParts, Runtime, Sample, Step
from rlhfless_ray.cli.guarded import guarded

QUICKSTART = Path(__file__).parent / "quickstart.yaml"


class Curriculum:
    """Prefer prompts of whose responses about half were right. Prompts without a response count as such."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.rng = rows, np.random.default_rng(seed)
        self.rewards: dict[int, list[float]] = defaultdict(lambda: [0.5])

    def pick(self, count: int) -> list[int]:
        """Return the rows of the next `count` prompts: the best of three times as many."""
        rows = self.rng.choice(self.rows, min(3 * count, self.rows), replace=False).tolist()
        return sorted(rows, key=lambda row: abs(np.mean(self.rewards[row][-8:]) - 0.5))[:count]

    def observe(self, samples: list[Sample]) -> None:
        for sample in samples:
            self.rewards[sample.prompt.index].append(sample.reward or 0.0)


def with_bonus(samples: list[Sample]) -> list[float | None]:
    """Return the verifier's rewards, with up to 0.1 more for a short right response."""
    return [s.reward and s.reward + 0.1 / (1 + len(s.completion.token_ids)) for s in samples]


def train(run: RunParts, curriculum: Curriculum) -> Iterator[Step]:
    session, updates = run.session, run.updates
    run.evaluations.make_up()
    step = session.admit(curriculum.pick)
    while step is not None:
        session.take(step)
        updates.score(step, with_bonus)
        curriculum.observe(step.samples)
        with updates.phase(step):
            update = updates.start(updates.advantages(step))
            upcoming = session.admit(curriculum.pick)  # while the learner works
            updates.publish(update)
        run.evaluations.run(step)
        run.records.close(step)
        yield step
        step = upcoming
    run.records.finish()


def main(overrides: list[str]) -> None:
    recipe = Recipe.load(QUICKSTART, overrides)
    with Runtime(recipe) as run:
        curriculum = Curriculum(len(run.inputs.prompts.train), recipe.run.seed)
        for step in train(run.parts, curriculum):
            rows = sorted({sample.prompt.index for sample in step.samples})
            print(f"step {step.number}: engines {step.plan.actors}, reward {step.metrics['reward/mean']:.2f}, rows {rows[:4]} …")


if __name__ == "__main__":
    guarded(lambda: main(sys.argv[1:]))  # a mistake in a key is one sentence
