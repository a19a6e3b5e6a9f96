"""rlhfless-ray: an elastic runtime for RLHF on Ray. The names users need are loaded when asked for."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.generation import GenerationRecipe
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
    from rlhfless_ray.recipe.workflow_file import Workflow
    from rlhfless_ray.report.run_view import RunView
    from rlhfless_ray.runtime.evaluate_models import Evaluation, evaluate
    from rlhfless_ray.runtime.generation import generate
    from rlhfless_ray.runtime.run_workflow import run_workflow
    from rlhfless_ray.runtime.runtime import Runtime
    from rlhfless_ray.supervise.run_supervised import run_supervised

__all__ = [
    "Evaluation",
    "GenerationRecipe",
    "Recipe",
    "RunView",
    "Runtime",
    "SupervisedRecipe",
    "Workflow",
    "evaluate",
    "generate",
    "run_supervised",
    "run_workflow",
]
__version__ = "0.1.0"

# What Ray starts, it forks with Python in between; where gRPC has worked before (Serve's handles, in a notebook's second run), its fork
# handlers crash one such child in a hundred without a word. They serve only children that go on to use gRPC. Read when grpc is loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


_MODULES = {
    "Evaluation": "runtime.evaluate_models",
    "GenerationRecipe": "recipe.generation",
    "Recipe": "recipe",
    "RunView": "report.run_view",
    "Runtime": "runtime.runtime",
    "SupervisedRecipe": "recipe.supervised_sections",
    "Workflow": "recipe.workflow_file",
    "evaluate": "runtime.evaluate_models",
    "generate": "runtime.generation",
    "run_supervised": "supervise.run_supervised",
    "run_workflow": "runtime.run_workflow",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
