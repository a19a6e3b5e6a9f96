"""The ranks of a supervised stage while they train: a run of Ray Train in a thread, and the inbox that they report to."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.deadlines import fetch
from rlhfless_ray.common.disk_space import FULL, DiskFull
from rlhfless_ray.common.errors import RunError, UserError, one_line
from rlhfless_ray.local.cluster import has_dashboard
from rlhfless_ray.supervise.inbox import INBOX, Inbox

if TYPE_CHECKING:
    from rlhfless_ray.supervise.rank_start import RankStart

NO_SLOT = {"memory": 2.0**20}  # what a worker of Ray Train takes whose slot is leased: a bundle must not be empty
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
RESIZE_S = 60.0  # interval in which Ray Train looks for slots of more ranks
INBOX_S = 60.0  # deadline of its answers


class RanksFailed(RunError):
    """A rank was lost, or raised an error that is no mistake of the user's."""


class RankRun:
    """Ranks that train until they have ended. The constructor starts them."""

    def __init__(self, start: RankStart, nodes: list[str] | None, private: bool) -> None:
        """`nodes`: of the ranks, whose slots are leased. None: Ray Train finds slots, and starts ranks that were lost again.

        `private`: Ray runs on this machine for this run only.
        """
        import ray

        here = ray.get_runtime_context().get_node_id()
        self.inbox: Any = ray.remote(Inbox).options(num_cpus=0, label_selector={"ray.io/node-id": here}).remote()
        self.failure: BaseException | None = None  # what ended them
        self.thread = threading.Thread(target=self._train, args=(replace(start, inbox=self.inbox), nodes, private), daemon=True)
        self.thread.start()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive()

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

    def raise_failure(self, folder: Path) -> None:
        """Raise what ended the ranks, if they have failed. `folder`: of their checkpoints, for a full disk that names no file."""
        if self.failure is None:
            return
        root = _root(self.failure)
        if isinstance(root, (UserError, RunError)):
            raise root
        if isinstance(root, OSError) and root.errno in FULL:
            raise DiskFull(Path(root.filename or folder)) from self.failure
        raise RanksFailed(f"the ranks failed: {one_line(root, 600)}") from self.failure

    def _train(self, start: RankStart, nodes: list[str] | None, private: bool) -> None:
        """In a thread: start the ranks and wait for their end. What fails goes to `failure`."""
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

        from rlhfless_ray.supervise.rank_trainer import RankConfig, RankTrainer, train_rank

        logging.getLogger("ray.train").setLevel(logging.ERROR)
        recipe, ranks = start.recipe, start.recipe.learner.ranks
        workers: Any = ranks if recipe.min_ranks == ranks else (recipe.min_ranks, ranks)
        resources: dict[str, float] = {"CPU": 1, "GPU": 1} if start.device == "gpu" else {"CPU": start.threads}
        selectors = None
        if nodes is not None:
            workers, resources, selectors = len(nodes), NO_SLOT, [{"ray.io/node-id": node} for node in nodes]
        if private:  # its only node is this machine, which nobody drains, so no process needs to watch it
            os.environ[PREEMPTION_WATCHER] = "0"
        try:
            RankTrainer(
                partial(train_rank, start),
                torch_config=RankConfig(device=start.device, devices=start.devices),
                has_dashboard=not private and has_dashboard(),
                has_autoscaler=not private,
                sharing=recipe.learner.tensor_parallel,
                scaling_config=ScalingConfig(
                    num_workers=workers,
                    # to grow, Ray Train starts the ranks again from the last checkpoint
                    elastic_resize_monitor_interval_s=RESIZE_S if recipe.checkpoint.has_regular else float("inf"),  # type: ignore[call-arg]
                    use_gpu=start.device == "gpu" and nodes is None,
                    resources_per_worker=resources,
                    label_selector=selectors,
                ),
                run_config=RunConfig(
                    name=start.storage.name,
                    storage_path=str(start.storage.parent),
                    failure_config=FailureConfig(max_failures=recipe.run.max_restarts if nodes is None else 0),
                    checkpoint_config=CheckpointConfig(num_to_keep=recipe.checkpoint.keep),
                ),
            ).fit()
        except BaseException as error:  # of any type, and this thread must not hide it
            self.failure = error
        finally:
            if private:
                del os.environ[PREEMPTION_WATCHER]


def _root(error: BaseException) -> BaseException:
    """Return the error that a rank or Ray Train's controller raised, of those that are wrapped around it."""
    failures = getattr(error, "worker_failures", None)
    return next(iter(failures.values())) if failures else getattr(error, "controller_failure", error)
