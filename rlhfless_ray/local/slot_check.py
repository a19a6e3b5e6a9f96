"""Check that a cluster has as many slots as a run needs at once."""

from __future__ import annotations

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe


def check_slots(recipe: Recipe | SupervisedRecipe, slots: int, resource: str) -> None:
    """Raise UserError if a run needs more slots at once than the whole cluster has. `resource`: "cpu" or "gpu"."""
    if isinstance(recipe, Recipe) and recipe.run.exact and resource == "gpu":
        raise UserError(
            "run.exact: true is kept on CPU cores only, and the slots are GPUs, where logits depend on the requests beside them; set "
            "functions.slot=cpu, or run.exact=false and run.deterministic=true"
        )
    threads = recipe.learner.max_slots_per_rank if resource == "cpu" else 1
    if isinstance(recipe, SupervisedRecipe):
        wanted = {"run.min_ranks" if recipe.run.min_ranks else "learner.ranks": recipe.min_ranks * threads}
    else:
        worker_groups = {"critic": recipe.algorithm.has_critic, "reference": recipe.has_reference, "learner": True}
        wanted = {f"{name}.ranks": getattr(recipe, name).ranks for name, there in worker_groups.items() if there}
        wanted["rollout.min_actors"] = recipe.rollout.min_actors * recipe.rollout.least_width
    for key, needed in wanted.items():
        if needed > slots:
            unit = "GPUs" if resource == "gpu" else "CPU cores"
            raise UserError(f"{key}: {needed} slots at once, but the cluster has {slots} ({unit}); lower it or add nodes")
    if isinstance(recipe, Recipe) and recipe.rollout.rolls_out_ahead:
        learner, engines = recipe.learner.ranks * threads, wanted["rollout.min_actors"]
        if learner + engines > slots:
            keys = "learner.ranks × learner.max_slots_per_rank" if resource == "cpu" else "learner.ranks"
            own = "rollout.min_actors" + (" × rollout.tensor_parallel" if recipe.rollout.least_width > 1 else "")
            raise UserError(
                f"rollout.max_lag_steps: the learner ({keys} = {learner}) and the engines ({own} = {engines}) "
                f"hold slots at once, but the cluster has {slots}; lower one of them, or set max_lag_steps to 0"
            )
