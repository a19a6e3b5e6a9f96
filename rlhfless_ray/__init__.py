"""rlhfless-ray: an elastic runtime for synchronous RLHF on Ray. The names users need are loaded when asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.runtime.runtime import Runtime

__all__ = ["Recipe", "Runtime"]
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
