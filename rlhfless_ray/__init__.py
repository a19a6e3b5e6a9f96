"""rlhfless-ray: an elastic runtime for synchronous RLHF on Ray. The names users need are loaded when asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
    from rlhfless_ray.runtime.runtime import Runtime
    from rlhfless_ray.supervise.run_supervised import run_supervised

__all__ = ["Recipe", "Runtime", "SupervisedRecipe", "run_supervised"]
__version__ = "0.1.0"

# What Ray starts, it forks with Python in between; where gRPC has worked before (Serve's handles, in a notebook's second run), its fork
# handlers crash one such child in a hundred without a word. They serve only children that go on to use gRPC. Read when grpc is loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from rlhfless_ray.recipe import Recipe

        return Recipe
    if name == "Runtime":
        from rlhfless_ray.runtime.runtime import Runtime

        return Runtime
    if name == "SupervisedRecipe":
        from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

        return SupervisedRecipe
    if name == "run_supervised":
        from rlhfless_ray.supervise.run_supervised import run_supervised

        return run_supervised
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
