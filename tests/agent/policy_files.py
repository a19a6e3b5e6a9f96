"""The files of a small policy without its weights, which are all that an agent's process reads."""

from __future__ import annotations

from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.model_folder import without_weights
from rlhfless_ray.weights.tensor_file import Files
from rlhfless_ray.weights.tiny_model import scratch_policy


def policy_files() -> Files:
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"hidden_size": 32, "layers": 1}})
    return without_weights(scratch_policy(recipe, task("chain")))
