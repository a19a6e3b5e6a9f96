"""The ranks of a supervised stage while they train, as the driver sees them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhfless_ray.common.deadlines import fetch
from rlhfless_ray.common.disk_space import FULL, DiskFull
from rlhfless_ray.common.errors import RunError, UserError, one_line
from rlhfless_ray.local.cluster import has_dashboard
from rlhfless_ray.supervise.inbox import TRAINING, Inbox
from rlhfless_ray.supervise.rank_start import INBOX, RankStart

INBOX_S = 60.0  # deadline of its answers
VARIABLES = ("RAY_TRAIN_", "NCCL_RAS_ADDR")  # what Ray Train reads where the trainer is, and passes on to its processes, begins so


class RanksFailed(RunError):
    """A rank was lost, or raised an error that is no mistake of the user's."""


class RankRun:
    """Ranks that train until they have ended. The constructor starts them."""

    def __init__(self, start: RankStart, nodes: list[str], private: bool) -> None:
        """`nodes`: of the ranks, whose slots are leased. `private`: Ray runs on this machine for this run only."""
        import ray

        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        options: dict[str, Any] = {"num_cpus": 0, "label_selector": here, "concurrency_groups": {TRAINING: 1}}
        self.inbox: Any = ray.remote(**options)(Inbox).remote()
        self.failure: BaseException | None = None  # what ended them
        train: Any = self.inbox.train
        variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}  # a joined cluster lacks them
        self.training = train.options(concurrency_group=TRAINING).remote(
            replace(start, inbox=self.inbox), nodes, private, has_dashboard(), variables
        )

    @property
    def is_alive(self) -> bool:
        import ray

        return not ray.wait([self.training], timeout=0)[0]

    def take_reports(self) -> list[tuple[str, Any]]:
        """Return what the ranks have posted since the last call, without an error, which `raise_failure` raises."""
        reports = fetch(self.inbox.take.remote(), INBOX_S, INBOX)
        for kind, content in reports:
            if kind == "error":
                self.failure = content
        return [report for report in reports if report[0] != "error"]

    def stop(self) -> None:
        """Ask the ranks to end after this step, once it is saved."""
        fetch(self.inbox.stop.remote(), INBOX_S, INBOX)

    def close(self) -> None:
        """Take what ended the ranks, and end the actor."""
        try:
            ended = fetch(self.training, INBOX_S, INBOX)
        except Exception as error:  # of any type that Ray cannot send
            ended = error
        self.failure = self.failure or ended
        self.kill()

    def kill(self) -> None:
        """End the actor, and with it ranks that still train. Ray would keep it, because it was given its own handle."""
        import ray

        ray.kill(self.inbox)

    def raise_failure(self, folder: Path) -> None:
        """Raise what ended the ranks, if they have failed. `folder`: of their checkpoints, for a full disk that names no file."""
        if self.failure is None:
            return
        if isinstance(self.failure, (UserError, RunError)):
            raise self.failure
        if isinstance(self.failure, OSError) and self.failure.errno in FULL:
            raise DiskFull(Path(self.failure.filename or folder)) from self.failure
        raise RanksFailed(f"the ranks failed: {one_line(self.failure, 600)}") from self.failure
