"""The parts of a run, each with one duty."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless_ray.runtime.evaluation import Evaluations
from rlhfless_ray.runtime.saved_state import SavedState
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.runtime.step_records import StepRecords
from rlhfless_ray.runtime.updates import Updates
from rlhfless_ray.session.rollout_session import RolloutSession


@dataclass(frozen=True)
class RunParts:
    """What a loop calls: the verbs of `session`, `updates`, `evaluations` and `records`. The others work below them.

    Examples:
        >>> from rlhfless_ray import Recipe, Runtime
        >>> short = ["run.steps=1", "warm_start.steps=0", "watch.progress=off", "watch.wandb=off"]
        >>> with Runtime(Recipe.load("recipes/quickstart.yaml", short)) as run:
        ...     session, updates = run.parts.session, run.parts.updates
        ...     step = session.admit()
        ...     session.take(step)
        ...     scored = updates.score(step)
        ...     with updates.phase(step):
        ...         updates.publish(updates.start(updates.advantages(step)))
        ...     run.parts.records.close(step)
        ...     print(session.weights.version, session.admit())
        1 None
    """

    stages: Stages  # processes, and in `stages.context` recipe, recorder, planner and leases
    session: RolloutSession  # groups in flight, from prompts to samples
    updates: Updates  # from samples to weights
    evaluations: Evaluations
    records: StepRecords
    state: SavedState  # checkpoints
