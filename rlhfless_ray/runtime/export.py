"""Write the model folders of a run: policy, adapters and critic. Weights go from the rank that has them straight into the folder."""

from __future__ import annotations

from pathlib import Path

from rlhfless_ray.learn.colocation import ColocatedGroups
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run.checkpoints import swap_folder
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.run.put_model import put_model
from rlhfless_ray.weights.adapter import CONFIG as ADAPTER_CONFIG
from rlhfless_ray.weights.adapter import with_base
from rlhfless_ray.weights.model_folder import complete_folder, read_files, without_weights
from rlhfless_ray.weights.remote_folder import Writer
from rlhfless_ray.weights.tensor_file import Files


def model_folder(weights: Writer, files: Files) -> Writer:
    """Return a writer of a Hugging Face model folder. `weights`: writes the weights. `files`: its config, tokenizer and other files."""

    def write(folder: Path) -> dict[str, str]:
        sums = weights(folder)
        complete_folder(folder, files)
        return sums

    return write


def trained_policy(recipe: Recipe, folder: RunFolder, files: Files, learner: WorkerGroup) -> Writer:
    """Return a writer of the policy as a Hugging Face model folder: weights, their moving average, or adapters.

    `files`: of the initial policy's folder.
    """

    def weights(target: Path) -> dict[str, str]:
        sums = learner.storage.save_model(target, trained=True)
        if recipe.lora.rank:
            name = recipe.policy.path or str(folder.path / "reference")
            is_folder = Path(name).is_dir()  # else a name on the hub
            config = target / ADAPTER_CONFIG
            config.write_bytes(with_base(config.read_bytes(), str(Path(name).resolve()) if is_folder else name))
        return sums

    return model_folder(weights, without_weights(files))


def write_models(recipe: Recipe, folder: RunFolder, files: Files, critic_files: Files | None, groups: ColocatedGroups) -> None:
    """Write the final models into the run folder and to `save.path`.

    `files`, `critic_files`: of the initial folders. `critic_files` None: the critic began as the policy.
    """
    save_path, others = recipe.save.path, without_weights(files)
    trained = trained_policy(recipe, folder, files, groups.learner)
    if recipe.lora.rank:
        saved = swap_folder(folder.path / "adapter", trained)
        folder.write_model(model_folder(groups.save_policy, others))
    else:
        saved = folder.write_model(trained if recipe.ema.beta is not None else model_folder(groups.save_policy, others))
    if save_path:
        put_model(Path(save_path), read_files(saved))
    if recipe.critic.save:
        critic = swap_folder(folder.path / "critic", model_folder(groups.save_critic, without_weights(critic_files or files)))
        if save_path:
            put_model(Path(save_path.rstrip("/") + "_critic"), read_files(critic))
