"""Close a run folder, however the run ended and however full the disk is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlhfless_ray.common.disk_space import DiskFull
from rlhfless_ray.report.progress_display import ProgressDisplay
from rlhfless_ray.run.folder import RunFolder


def close_folder(folder: RunFolder, progress: ProgressDisplay, works: Iterable[Callable[[], object]], status: str, reason: str) -> None:
    """Write the last rows (`works`), the status, the timeline and the report.

    On a full disk everything that has space is written. Raises DiskFull if that is the only reason for the run to fail.
    """
    from rlhfless_ray.report.report import write_report
    from rlhfless_ray.report.timeline import write_timeline

    full: list[DiskFull] = []

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except DiskFull as error:
            full.append(error)

    def end() -> None:
        ended = ("failed", str(full[0])) if full and status == "done" else (status, reason)
        folder.end(*ended)

    folder.reserve.release()
    for work in works:
        attempt(work)
    attempt(end)
    attempt(lambda: write_timeline(folder.path))
    attempt(lambda: write_report(folder.path))
    if full:
        attempt(end)
        progress.message("; ".join(dict.fromkeys(f"{error.path} is not up to date: the disk is full" for error in full)))
    progress.close()
    if full and status == "done":
        raise full[0]
