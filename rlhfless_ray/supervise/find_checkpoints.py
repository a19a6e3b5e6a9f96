"""Find the checkpoints that Ray Train has made for a supervised stage, in its run folder or in `checkpoint.path`."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.checkpoint_files import DamagedCheckpoint, check_files
from rlhfless_ray.run.folder import RunFolder, folders_of, status_written_s
from rlhfless_ray.weights.model_folder import WEIGHTS, is_safetensors, read_content

CHECKPOINTS = "checkpoints"
PROGRESS = "progress.json"  # of a checkpoint
RANKS = "ranks"  # key of PROGRESS: number of ranks, each of which writes checksums. Older checkpoints have none
OF_RANKS = "checksums-*.json"
ASIDE = "aside_"  # a checkpoint that --resume=previous left out
SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's list of checkpoints, which it overwrites in place

OF_RANK = re.compile(r"(.+)-\d{5}-of-(\d{5})" + re.escape(WEIGHTS))  # see `shard_name`


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint that Ray Train has made in a folder."""
    return next(_whole_checkpoints(folder), None)


def _whole_checkpoints(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("checkpoint_*"), reverse=True) if _is_whole(path))


def chosen_checkpoint(folder: Path, *, previous: bool) -> Path:
    """Return the newest whole checkpoint or, if `previous`, the newest one before it whose files are as they were written.

    Raises DamagedCheckpoint if its files are not, and UserError if there is none.
    """
    found = list(_whole_checkpoints(folder))
    if not previous:
        check_files(found[0])
        return found[0]
    for path in found[1:]:
        with suppress(DamagedCheckpoint):
            check_files(path)
            return path
    raise UserError(f"--resume=previous: there is no undamaged checkpoint before {found[0]}; start without --resume")


def set_aside_after(checkpoint: Path) -> str:
    """Set the checkpoints after one aside, and Ray Train's list of them. Returns a message for the user."""
    aside = [path for path in checkpoint.parent.glob("checkpoint_*") if path.name > checkpoint.name]
    for path in aside:
        os.rename(path, path.with_name(f"{ASIDE}{path.name}"))
    (checkpoint.parent / SNAPSHOT).unlink(missing_ok=True)
    names = ", ".join(f"{ASIDE}{path.name}" for path in aside)
    return (
        f"--resume=previous: going on from {checkpoint.name}; what came after it is in {names} of {checkpoint.parent}, which may be removed"
    )


def _is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint has all files, and whole. A kill or a full disk may end their copy anywhere, and in any order."""
    files = list(checkpoint.glob(f"*{WEIGHTS}"))
    of_ranks = Counter(match.groups() for file in files if (match := OF_RANK.fullmatch(file.name)))
    return (
        _is_json(checkpoint / PROGRESS)
        and len(list(checkpoint.glob(OF_RANKS))) >= int(progress_of(checkpoint).get(RANKS, 0))
        and all(count == int(ranks) for (_, ranks), count in of_ranks.items())
        and all(is_safetensors(read_content(file)) for file in files)
    )


def _is_json(file: Path) -> bool:
    """Return whether a file holds a JSON object."""
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except (OSError, ValueError):
        return False


def remove_torn(folder: Path) -> list[str]:
    """Remove what a kill or a full disk has left half written: checkpoints, and Ray Train's list, without which it would not start.

    Returns a message for the user about each checkpoint.
    """
    torn = [path for path in sorted(folder.glob("checkpoint_*")) if path.is_dir() and not _is_whole(path)]
    for path in torn:
        shutil.rmtree(path)
    if not _is_json(folder / SNAPSHOT):
        (folder / SNAPSHOT).unlink(missing_ok=True)
    return [f"{path} was not complete, as after a kill, and is removed: its steps are repeated" for path in torn]


def progress_of(checkpoint: Path) -> JsonObject:
    """Return `steps` that a checkpoint has done, the `order` of their rows, sizes of its `model` and its `recipe`."""
    return dict(json.loads((checkpoint / PROGRESS).read_bytes()))


def progress_saved(folder: Path) -> JsonObject:
    """Return the progress of the newest checkpoint, see `progress_of`; empty without one."""
    newest = newest_checkpoint(folder)
    return {} if newest is None else progress_of(newest)


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
