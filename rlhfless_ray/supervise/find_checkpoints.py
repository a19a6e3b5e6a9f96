"""Find the checkpoints that Ray Train has made for a supervised stage, in its run folder or in `checkpoint.path`."""

from __future__ import annotations

import json
from pathlib import Path

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.folder import RunFolder

CHECKPOINTS = "checkpoints"
PROGRESS = "progress.json"  # of a checkpoint


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that Ray Train has made in a folder."""
    found = [path for path in folder.glob("checkpoint_*") if (path / PROGRESS).is_file()]
    return max(found, key=lambda path: path.name, default=None)


def steps_saved(folder: Path) -> int | None:
    """Return the steps that the newest checkpoint has done, None without one."""
    newest = newest_checkpoint(folder)
    return None if newest is None else int(json.loads((newest / PROGRESS).read_text())["steps"])


def has_checkpoint(recipe: SupervisedRecipe) -> bool:
    """Return whether a run of this name has a checkpoint to continue from."""
    return bool(_folders_with_checkpoints(recipe))


def newest_folder(recipe: SupervisedRecipe) -> RunFolder:
    """Return the newest of `<name>`, `<name>-2`, … with a checkpoint. Raises UserError if there is none."""
    found = _folders_with_checkpoints(recipe)
    if not found:
        where = Path(recipe.run.root) / recipe.run.name
        raise UserError(f"--resume: no run with a checkpoint in {where}; start it without --resume")
    return RunFolder(max(found, key=lambda p: (p / "status.json").stat().st_mtime if (p / "status.json").exists() else 0.0))


def _folders_with_checkpoints(recipe: SupervisedRecipe) -> list[Path]:
    root, name = Path(recipe.run.root), recipe.run.name
    family = [p for p in root.glob(f"{name}*") if p.name == name or p.name.removeprefix(f"{name}-").isdigit()]
    elsewhere = recipe.checkpoint.path
    return [p for p in family if newest_checkpoint(Path(elsewhere) / p.name if elsewhere else p / CHECKPOINTS)]
