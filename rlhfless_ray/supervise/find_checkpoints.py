"""Find the checkpoints that Ray Train has made for a supervised stage, in its run folder or in `checkpoint.path`."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.folder import RunFolder, folders_of, status_written_s
from rlhfless_ray.weights.model_folder import WEIGHTS, is_safetensors, read_content

CHECKPOINTS = "checkpoints"
PROGRESS = "progress.json"  # of a checkpoint
SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's list of checkpoints, which it overwrites in place

OF_RANK = re.compile(r"(.+)-\d{5}-of-(\d{5})" + re.escape(WEIGHTS))  # see `shard_name`


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint that Ray Train has made in a folder."""
    return next((path for path in sorted(folder.glob("checkpoint_*"), reverse=True) if _is_whole(path)), None)


def _is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint has all files, and whole. A kill or a full disk may end their copy anywhere, and in any order."""
    files = list(checkpoint.glob(f"*{WEIGHTS}"))
    of_ranks = Counter(match.groups() for file in files if (match := OF_RANK.fullmatch(file.name)))
    return (
        _is_json(checkpoint / PROGRESS)
        and all(count == int(ranks) for (_, ranks), count in of_ranks.items())
        and all(is_safetensors(read_content(file)) for file in files)
    )


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return True


def remove_torn(folder: Path) -> None:
    """Remove what a kill or a full disk has left half written: checkpoints, and Ray Train's list, without which it would not start."""
    for path in folder.glob("checkpoint_*"):
        if path.is_dir() and not _is_whole(path):
            shutil.rmtree(path)
    if not _is_json(folder / SNAPSHOT):
        (folder / SNAPSHOT).unlink(missing_ok=True)


def progress_saved(folder: Path) -> dict[str, Any]:
    """Return `steps` that the newest checkpoint has done, the `order` of their rows and sizes of its `model`; empty without one."""
    newest = newest_checkpoint(folder)
    return {} if newest is None else json.loads((newest / PROGRESS).read_text())


def steps_saved(folder: Path) -> int | None:
    """Return the steps that the newest checkpoint has done, None without one."""
    return progress_saved(folder).get("steps")


def has_checkpoint(recipe: SupervisedRecipe) -> bool:
    """Return whether a run of this name has a checkpoint to continue from."""
    return bool(_checkpoints_of_runs(recipe))


def newest_folder(recipe: SupervisedRecipe) -> RunFolder:
    """Return the newest of `<name>`, `<name>-2`, … with a checkpoint. It may not exist any more if the checkpoint is elsewhere.

    Raises UserError if there is none.
    """
    found = _checkpoints_of_runs(recipe)
    if not found:
        where = recipe.checkpoint.path or Path(recipe.run.root) / recipe.run.name
        raise UserError(f"--resume: no run with a checkpoint in {where}; start it without --resume")
    return RunFolder(max(found, key=lambda run: (status_written_s(run), found[run].name)))


def _checkpoints_of_runs(recipe: SupervisedRecipe) -> dict[Path, Path]:
    """Return {run folder: its newest checkpoint} of all runs of this name."""
    root, elsewhere = Path(recipe.run.root), recipe.checkpoint.path
    family = folders_of(recipe, elsewhere)
    newest = {root / p.name: newest_checkpoint(p if elsewhere else p / CHECKPOINTS) for p in family}
    return {run: checkpoint for run, checkpoint in newest.items() if checkpoint}
