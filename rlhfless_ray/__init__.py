"""rlhfless-ray: an elastic runtime for RLHF on Ray. Public names are imported when they are first used."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as`: type checkers take them as exported
    from rlhfless_ray.front.train import make_recipe as make_recipe
    from rlhfless_ray.front.train import train as train
    from rlhfless_ray.front.trained_run import TrainedRun as TrainedRun
    from rlhfless_ray.recipe import Recipe as Recipe
    from rlhfless_ray.recipe.generation import GenerationRecipe as GenerationRecipe
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe as SupervisedRecipe
    from rlhfless_ray.recipe.workflow_file import Workflow as Workflow
    from rlhfless_ray.report.run_view import RunView as RunView
    from rlhfless_ray.runtime.evaluate_models import Evaluation as Evaluation
    from rlhfless_ray.runtime.evaluate_models import evaluate as evaluate
    from rlhfless_ray.runtime.generation import generate as generate
    from rlhfless_ray.runtime.run_parts import RunParts as RunParts
    from rlhfless_ray.runtime.run_workflow import run_workflow as run_workflow
    from rlhfless_ray.runtime.runtime import Runtime as Runtime
    from rlhfless_ray.step.step import Step as Step
    from rlhfless_ray.supervise.run_supervised import run_supervised as run_supervised
    from rlhfless_ray.types import Sample as Sample

__version__ = "0.1.0"

# If gRPC was in use before, its fork handlers silently crash about one in a hundred of the processes that Ray forks. In a notebook's
# second run Ray Serve's handles have used it. Only children that use gRPC need the handlers. grpc reads the variable when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


_MODULES = {
    "Evaluation": "runtime.evaluate_models",
    "GenerationRecipe": "recipe.generation",
    "Recipe": "recipe",
    "RunParts": "runtime.run_parts",
    "RunView": "report.run_view",
    "Runtime": "runtime.runtime",
    "Sample": "types",
    "Step": "step.step",
    "SupervisedRecipe": "recipe.supervised_sections",
    "TrainedRun": "front.trained_run",
    "Workflow": "recipe.workflow_file",
    "evaluate": "runtime.evaluate_models",
    "generate": "runtime.generation",
    "make_recipe": "front.train",
    "run_supervised": "supervise.run_supervised",
    "run_workflow": "runtime.run_workflow",
    "train": "front.train",
}


__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
