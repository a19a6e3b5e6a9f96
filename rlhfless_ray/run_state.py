"""What the driver knows of a run, beside what the learner holds: for a checkpoint, as JSON, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhfless_ray.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.runtime import Runtime


def state_of(run: Runtime) -> dict[str, Any]:
    """As of the last finished step: a stop inside a step repeats it whole."""
    return {
        "step": run.steps_done, "version": run.weights.version if run.weights else 0, "cursor": run.cursor_done,
        "refill": run.refill_done,
        "autoscaler": run.autoscaler.state(), "learning": run.learn_stage.state(), "moves": run.rollout_stage.state(),
        "prefix": run.stages.prefix.speed.state() if run.stages.prefix is not None else {},
        "skipped_in_a_row": run.gang.skipped_in_a_row, "owes_evaluation": run.owes_evaluation,
        "best_value": run.best.value, "run_folder": str(run.folder.path.resolve()),
    }


def restore(run: Runtime, state: dict[str, Any]) -> None:
    """Raises UserError when the state is of another version of this program."""
    run.cursor.restore(state["cursor"])
    run.cursor_done = run.cursor.state()
    if run.recipe.algorithm.filter_range is not None:
        run.refill.restore(state.get("refill", []), run.prompts.train)
        run.refill_done = run.refill.state()
    try:
        run.autoscaler.restore(state["autoscaler"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--resume: the checkpoint's planner is of another version of this program ({error}); start the run anew under "
            "another run.name"
        ) from None
    run.learn_stage.restore(state.get("learning", {}))
    run.rollout_stage.restore(state.get("moves", {}))
    if run.stages.prefix is not None:
        run.stages.prefix.speed.restore(state.get("prefix", {}))
    run.gang.skipped_in_a_row = state["skipped_in_a_row"]
    run.owes_evaluation = state.get("owes_evaluation", run.steps_done == 0)
    if not run.owes_evaluation:  # a stop before the next step has nothing to save: written anew the checkpoint would lose its metric
        run.saved = run.steps_done
    run.best.value = state.get("best_value")
