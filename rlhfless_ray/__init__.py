"""rlhfless-ray: an elastic runtime for synchronous RLHF on Ray. The names users need are loaded when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.runtime import Runtime

__all__ = ["Recipe", "Runtime"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from rlhfless_ray.recipe import Recipe

        return Recipe
    if name == "Runtime":
        from rlhfless_ray.runtime import Runtime

        return Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
