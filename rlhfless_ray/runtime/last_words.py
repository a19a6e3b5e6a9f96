"""Write how a run ended whose driver or Ray died: a sentence on stderr, the status, the timeline and the report.

`python -m rlhfless_ray.runtime.last_words FOLDER NAME WHAT`, as the watcher of a driver calls it. `NAME`: the folder as the user named it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe.run_sections import CheckpointConfig
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.run.responses import RECORD


def main(path: str, name: str, what: str) -> None:
    folder = RunFolder(Path(path))
    folder.status = folder.read_status()
    reason = f"{what}; {what_is_saved(folder, name)}"
    with suppress(OSError):  # nobody reads it
        print(f"run failed: {reason}", file=sys.stderr, flush=True)
    folder.end("failed", reason)
    from rlhfless_ray.report.report import write_report
    from rlhfless_ray.report.timeline import write_timeline

    if (folder.path / "ledger.csv").exists():
        write_timeline(folder.path)
    write_report(folder.path)


def what_is_saved(folder: RunFolder, name: str) -> str:
    """Say what a run has saved, and how to go on from there."""
    if (folder.path / RECORD).is_file():
        return f"the responses so far are saved in {name}: go on with the same command and --resume"
    tree = folder.recipe_before() or {}
    steps = saved_steps(tree, folder.path)
    if steps is None:
        return "nothing is saved yet: start the run again"
    return f"step {steps} is saved: go on with the same command and --resume, or with `rlhfless train {name}/recipe.yaml --resume`"


def saved_steps(tree: JsonObject, folder: Path) -> int | None:
    """Return the step of the newest checkpoint, None without one. `tree`: the run's recipe."""
    section = tree.get("checkpoint") or {}
    if "task" in tree:
        from rlhfless_ray.supervise.find_checkpoints import CHECKPOINTS, steps_saved

        return steps_saved(Path(section["path"]) / folder.name if section.get("path") else folder / CHECKPOINTS)
    found = Checkpoints(CheckpointConfig(**section), folder).list()
    return found[-1][0] if found else None


if __name__ == "__main__":
    main(*sys.argv[1:])
