"""Write the model folders of a run: policy, adapters and critic."""

from __future__ import annotations

from pathlib import Path

from rlhfless_ray.learn.colocation import ColocatedGroups
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run.checkpoints import swap_folder
from rlhfless_ray.run.folder import RunFolder, put_files
from rlhfless_ray.weights.adapter import adapter_files
from rlhfless_ray.weights.model_folder import with_weights, without_weights
from rlhfless_ray.weights.tensor_file import Files


def policy_files(recipe: Recipe, folder: RunFolder, files: Files, snapshot: Files, learner: WorkerGroup) -> Files:
    """Return the policy as a Hugging Face model folder: the learner's weights or adapters, with tokenizer and config.

    `files`: of the initial policy's folder. `snapshot`: the learner's files. `learner`: converts weight names into those that
    `save_pretrained` writes.
    """
    if recipe.lora.rank:
        start = Path(recipe.policy.path) if recipe.policy.path else folder.path / "reference"
        return {**without_weights(files), **adapter_files(snapshot, str(start.resolve()))}
    weights = snapshot.get("ema.safetensors", snapshot["model.safetensors"])  # the moving average, if there is one
    return with_weights(without_weights(files), learner.saved(weights))


def write_models(recipe: Recipe, folder: RunFolder, files: Files, critic_files: Files | None, groups: ColocatedGroups) -> None:
    """Write the final models into the run folder and to `save.path`.

    `files`, `critic_files`: of the initial folders. `critic_files` None: the critic began as the policy.
    """
    save_path = recipe.save.path
    if recipe.lora.rank or recipe.ema.beta is not None:
        policy = policy_files(recipe, folder, files, groups.learner.snapshot(), groups.learner)
    else:  # without the optimizer's state, which is several times as large
        policy = groups.policy_model(without_weights(files))
    if recipe.lora.rank:
        swap_folder(folder.path / "adapter", policy)
        folder.write_model(groups.policy_model(without_weights(files)))
    else:
        folder.write_model(policy)
    if save_path:
        put_files(Path(save_path), policy)
    if recipe.critic.save:
        critic = groups.critic_model(without_weights(critic_files or files))
        swap_folder(folder.path / "critic", critic)
        if save_path:
            put_files(Path(save_path.rstrip("/") + "_critic"), critic)
