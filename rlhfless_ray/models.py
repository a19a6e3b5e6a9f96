"""The folders of models that a run makes: the policy's, its adapters', the critic's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.run_folder import put_files
from rlhfless_ray.weights.adapter import adapter_files
from rlhfless_ray.weights.folder import without_weights, write_folder

if TYPE_CHECKING:
    from rlhfless_ray.runtime import Runtime


def policy_files(run: Runtime, learner: dict[str, bytes]) -> dict[str, bytes]:
    """The policy as Hugging Face's libraries load it: the learner's weights, or adapters, beside tokenizer and config."""
    if run.recipe.lora.rank:
        start = Path(run.recipe.policy.path) if run.recipe.policy.path else run.folder.path / "reference"
        return {**without_weights(run.files), **adapter_files(learner, str(start.resolve()))}
    weights = learner.get("ema.safetensors", learner["model.safetensors"])  # the average, where one is kept
    return {**without_weights(run.files), "model.safetensors": weights}


def write_models(run: Runtime) -> None:
    """Those at the end of the run, in its folder and where `save.path` says."""
    files, save_path = policy_files(run, run.gang.snapshot()), run.recipe.save.path
    if run.recipe.lora.rank:
        write_folder(run.folder.path / "adapter", files)
        run.folder.write_model(run.learn_stage.gangs.policy_model(without_weights(run.files)))
    else:
        run.folder.write_model(files)
    if save_path:
        put_files(Path(save_path), files)
    if run.recipe.critic.save:
        critic = run.learn_stage.gangs.critic_model(without_weights(run.critic_files or run.files))
        write_folder(run.folder.path / "critic", critic)
        if save_path:
            put_files(Path(save_path.rstrip("/") + "_critic"), critic)
