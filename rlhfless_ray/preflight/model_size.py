"""Read the sizes of a recipe's models from config.json and safetensors headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from placement import memory
from placement.catalog.catalog import shipped_model
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.rollout.speculation import random_drafter_config
from rlhfless_ray.weights.model_folder import WEIGHTS, check_sizes, config_of, stored_tensors

MODEL_KEYS = {
    "policy": "policy.path",
    "critic": "critic.path",
    "reference": "reference.path",
    "reward": "reward.model_path",
    "drafter": "rollout.drafter",
    "teacher": "teacher.path",
}


@dataclass(frozen=True)
class ModelSize:
    """A model folder's size.

    `key`: the recipe's key that names it. `body`: parameters without the output head. `stored`: bytes of its weights on disk,
    which pass through the object store whole.
    """

    key: str
    config: JsonObject
    parameters: int
    body: int
    stored: int = 0

    @classmethod
    def of(cls, path: Path, key: str) -> ModelSize | None:
        """Read a folder's sizes. Returns None if they are unknown; loading the model reports what is wrong.

        Raises UserError if config.json has sizes that no model can have.
        """
        try:
            config = config_of({"config.json": (path / "config.json").read_bytes()})
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict):
            return None
        check_sizes(config, key)
        try:
            tensors = [(name, entry["shape"], entry["dtype"]) for name, entry in stored_tensors(path).items()]
            counts = [memory.header_parameters(tensors, head) if tensors else None for head in (True, False)]
        except (KeyError, TypeError, AttributeError):
            return None
        computed = [memory.parameter_count(config, head) for head in (True, False)]
        whole, body = (min((n for n in pair if n is not None), default=None) for pair in zip(counts, computed, strict=True))
        if whole is None or body is None:
            return None
        return cls(key, config, whole, body, sum(file.stat().st_size for file in path.glob(f"*{WEIGHTS}") if file.is_file()))


def models_of(recipe: Recipe | SupervisedRecipe, fetch: bool = True, policy: tuple[JsonObject, int] | None = None) -> dict[str, ModelSize]:
    """Return the models by name, see `MODEL_KEYS`. Folders that cannot be read are left out.

    Args:
        recipe: Names the folders.
        fetch: Ask the Hugging Face hub for the configuration of a policy that is not on this machine. Else a shipped one is taken.
        policy: Configuration and number of parameters of a policy that has no folder.
    """
    from rlhfless_ray.weights.load_policy import cached_folder, small_files

    models: dict[str, ModelSize] = {}
    if policy is not None:
        models["policy"] = ModelSize("policy.path", *policy, policy[1])
    for who, key in MODEL_KEYS.items():
        section, _, field = key.partition(".")
        text = getattr(getattr(recipe, section, None), field, "")
        path = Path(text)
        if text and (who == "policy" or isinstance(recipe, SupervisedRecipe)):
            path = small_files(text, key) if fetch else cached_folder(text)
        if text and path.is_dir() and (size := ModelSize.of(path, key)) is not None:
            models[who] = size
    if "policy" not in models and not fetch and (shipped := shipped_model(recipe.policy.path)):
        counts = [memory.parameter_count(shipped.config, head) for head in (True, False)]
        models["policy"] = ModelSize("policy.path", shipped.config, *(count or 0 for count in counts))
    if isinstance(recipe, SupervisedRecipe) or "policy" not in models:
        return models
    if recipe.algorithm.has_critic and not recipe.critic.path:
        models["critic"] = models["policy"]
    if recipe.rollout.drafter_train == "on" and not recipe.rollout.drafter:
        config = random_drafter_config(recipe, models["policy"].config)
        parameters = memory.parameter_count(config)
        assert parameters is not None
        models["drafter"] = ModelSize("rollout.drafter_train", config, parameters, parameters)
    return models
