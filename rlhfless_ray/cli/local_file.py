"""Read paths of the command line like those of a recipe."""

from __future__ import annotations

from pathlib import Path


def local_file(text: str) -> Path:
    """Return an expanded path, see `given_path`. Raises UserError for a URL, an unknown user and an unset variable."""
    from rlhfless_ray.recipe.local_path import given_path  # it takes long to import

    return given_path(text, "path")
