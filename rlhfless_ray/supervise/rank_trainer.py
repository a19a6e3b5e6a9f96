"""Ray Train's `TorchTrainer` of the ranks. Each rank sees its own device only, as engines and learners do."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import ray.train
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

from rlhfless_ray.supervise.rank_start import VISIBLE, RankStart

NO_SLOT = {"memory": 2.0**20}  # what a worker of Ray Train takes, whose slot is leased: a bundle must not be empty
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"


@dataclass
class RankConfig(TorchConfig):
    """How the ranks are connected. `device`: "cpu" or "gpu". `devices`: names of those that are leased on each node, by its id."""

    device: str = "cpu"
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        return ConnectedRanks


class ConnectedRanks(Backend):
    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Connect the ranks by torch.distributed, once each has its device and has imported what it needs."""
        worker_group.execute(prepare_rank, backend_config.devices)
        address, port = worker_group.execute_single(0, free_address)
        worker_group.execute(join_ranks, address, port, "cuda" if backend_config.device == "gpu" else "cpu")


def prepare_rank(devices: Mapping[str, tuple[str, ...]]) -> None:
    """In a rank: make its leased device the only visible one, and import."""
    if devices:
        node, number = ray.get_runtime_context().get_node_id(), ray.train.get_context().get_local_rank()
        os.environ[VISIBLE] = devices[node][number]
    import rlhfless_ray.supervise.train_loop  # noqa: F401


def free_address() -> tuple[str, int]:
    """In a rank: return the address of its node, and a free port."""
    from rlhfless_ray.learn.process_group import free_port

    address = ray.util.get_node_ip_address()
    return address, free_port(address)


def join_ranks(address: str, port: int, device: str) -> None:
    """In a rank: connect to the others. Rank 0 listens at this address."""
    from rlhfless_ray.learn.process_group import join_process_group

    context = ray.train.get_context()
    join_process_group((address, port), context.get_world_rank(), context.get_world_size(), device)


def train_rank(start: RankStart) -> None:
    """Run a rank, in its process."""
    from rlhfless_ray.supervise.train_loop import run_rank

    run_rank(start)


class WithoutAutoscaler(FixedScalingPolicy):
    """A fixed number of ranks on nodes that are there. It requests none, so Ray Train starts no actor for requests."""

    def _maybe_send_resource_request(self) -> None:
        pass

    def _send_resource_request(self) -> None:
        pass

    def _cancel_resource_request(self) -> None:
        pass


class RankTrainer(TorchTrainer):
    """Without Ray Train's manager of Ray Data's sets, which are none here."""

    def __init__(self, *arguments: Any, has_dashboard: bool, **settings: Any) -> None:
        """`has_dashboard`: if not, the cleaner of placement groups is left out: it asks the dashboard whether this run is alive, learns
        nothing, and its end would be waited for 12 s."""
        super().__init__(*arguments, **settings)
        self.has_dashboard = has_dashboard

    def _create_default_callbacks(self) -> Any:
        unused = ("DatasetsCallback", *(() if self.has_dashboard else ("PlacementGroupCleanerCallback",)))
        return [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in unused]  # type: ignore[misc]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        settings["scaling_policy"] = WithoutAutoscaler(settings["scaling_policy"].scaling_config)
        return super()._initialize_and_run_controller(**settings)  # type: ignore[misc]


def train_ranks(start: RankStart, nodes: list[str], private: bool, has_dashboard: bool) -> BaseException | None:
    """Start the ranks and wait for their end. Returns what ended them, if they failed. `nodes`, `private`: see `RankRun`."""
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    if private:  # its only node is this machine, which nobody drains, so no process needs to watch it
        os.environ[PREEMPTION_WATCHER] = "0"
    try:
        RankTrainer(
            partial(train_rank, start),
            torch_config=RankConfig(device=start.device, devices=start.devices),
            has_dashboard=not private and has_dashboard,
            scaling_config=ScalingConfig(
                num_workers=len(nodes),
                resources_per_worker=NO_SLOT,
                label_selector=[{"ray.io/node-id": node} for node in nodes],  # type: ignore[call-arg]
            ),
            run_config=RunConfig(
                name=start.storage.name,
                storage_path=str(start.storage.parent),
                failure_config=FailureConfig(max_failures=0),  # lost ranks start again on other slots
                checkpoint_config=CheckpointConfig(num_to_keep=start.recipe.checkpoint.keep),
            ),
        ).fit()
    except BaseException as error:  # of any type: the driver tells the user of it
        return root_failure(error)
    return None


def root_failure(error: BaseException) -> BaseException:
    """Return the error that a rank or Ray Train's controller raised, of those that are wrapped around it."""
    failures = getattr(error, "worker_failures", None)
    return next(iter(failures.values())) if failures else getattr(error, "controller_failure", error)
