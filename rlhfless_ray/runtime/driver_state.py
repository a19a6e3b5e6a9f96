"""Save and restore the driver's part of a checkpoint. The learner's part is separate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.autoscaler.autoscaler import Autoscaler
    from rlhfless_ray.learn.learn_stage import LearnStage
    from rlhfless_ray.learn.worker_group import WorkerGroup
    from rlhfless_ray.prompts.cursor import Cursor
    from rlhfless_ray.prompts.load_prompts import PromptSet
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.rollout.rollout_stage import RolloutStage
    from rlhfless_ray.run.checkpoints import Best
    from rlhfless_ray.run.folder import RunFolder
    from rlhfless_ray.runtime.dynamic_sampling import DynamicSampling
    from rlhfless_ray.runtime.stages import Stages
    from rlhfless_ray.types import WeightVersion


class Driver(Protocol):
    """The parts of a run that are saved in a checkpoint."""

    recipe: Recipe
    folder: RunFolder
    steps_done: int
    weights: WeightVersion | None
    prompts: PromptSet
    cursor: Cursor
    cursor_done: dict[str, Any]
    dynamic_sampling: DynamicSampling
    refill_done: list[dict[str, Any]]
    autoscaler: Autoscaler
    learn_stage: LearnStage
    rollout_stage: RolloutStage
    stages: Stages
    worker_group: WorkerGroup
    owes_evaluation: bool
    best: Best
    saved: int


def state_of(run: Driver) -> dict[str, Any]:
    """Return the state after the last finished step as JSON-serialisable values. A stop inside a step repeats the whole step."""
    return {
        "step": run.steps_done,
        "version": run.weights.version if run.weights else 0,
        "cursor": run.cursor_done,
        "refill": run.refill_done,
        "autoscaler": run.autoscaler.state(),
        "learning": run.learn_stage.state(),
        "moves": run.rollout_stage.state(),
        "prefix": run.stages.prefix.speed.state() if run.stages.prefix is not None else {},
        "skipped_in_a_row": run.worker_group.skipped_in_a_row,
        "owes_evaluation": run.owes_evaluation,
        "best_value": run.best.value,
        "run_folder": str(run.folder.path.resolve()),
    }


def restore(run: Driver, state: dict[str, Any]) -> None:
    """Restore a state. Raises UserError if it is from another version of this program."""
    run.cursor.restore(state["cursor"])
    run.cursor_done = run.cursor.state()
    if run.recipe.algorithm.filter_range is not None:
        run.dynamic_sampling.restore(state.get("refill", []), run.prompts.train)
        run.refill_done = run.dynamic_sampling.state()
    try:
        run.autoscaler.restore(state["autoscaler"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--resume: the checkpoint's planner state is of another version of this program ({error}); start a new run under another "
            "run.name"
        ) from None
    run.learn_stage.restore(state.get("learning", {}))
    run.rollout_stage.restore(state.get("moves", {}))
    if run.stages.prefix is not None:
        run.stages.prefix.speed.restore(state.get("prefix", {}))
    run.worker_group.skipped_in_a_row = state["skipped_in_a_row"]
    run.owes_evaluation = state.get("owes_evaluation", run.steps_done == 0)
    if not run.owes_evaluation:  # a stop before the next step must not write the checkpoint again, which would lose its metric
        run.saved = run.steps_done
    run.best.value = state.get("best_value")
