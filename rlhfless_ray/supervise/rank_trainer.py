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
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, FixedScalingPolicy

from rlhfless_ray.recipe.learn_sections import even_ranks
from rlhfless_ray.supervise.rank_start import VISIBLE, RankStart

NO_SLOT = {"memory": 2.0**20}  # what a worker of Ray Train takes whose slot is leased: a bundle must not be empty
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
RESIZE_S = 60.0  # interval in which Ray Train looks for slots of more ranks


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
    """A fixed number of ranks on a cluster that does not grow. It requests no nodes, so Ray Train starts no actor for requests."""

    def _maybe_send_resource_request(self) -> None:
        pass

    def _send_resource_request(self) -> None:
        pass

    def _cancel_resource_request(self) -> None:
        pass


class EvenRanks(ElasticScalingPolicy):
    """A range of ranks, of which as many are started as share copies of the model evenly."""

    def __init__(self, scaling_config: Any, sharing: int) -> None:
        """`sharing`: ranks that share a copy (`learner.tensor_parallel`)."""
        super().__init__(scaling_config)
        self.sharing = sharing

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        count, least = super()._count_possible_workers(reserved_resources), self.scaling_config.min_workers
        return count if count < least else max(least, even_ranks(count, self.sharing))


class RankTrainer(TorchTrainer):
    """Without Ray Train's manager of Ray Data's sets, which are none here."""

    def __init__(self, *arguments: Any, has_dashboard: bool, has_autoscaler: bool, sharing: int, **settings: Any) -> None:
        """`has_dashboard`: if not, the cleaner of placement groups is left out: it asks the dashboard whether this run is alive, learns
        nothing, and its end would be waited for 12 s. `has_autoscaler`: whether the cluster may grow. `sharing`: see `EvenRanks`."""
        super().__init__(*arguments, **settings)
        self.has_dashboard, self.has_autoscaler, self.sharing = has_dashboard, has_autoscaler, sharing

    def _create_default_callbacks(self) -> Any:
        unused = ("DatasetsCallback", *(() if self.has_dashboard else ("PlacementGroupCleanerCallback",)))
        return [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in unused]  # type: ignore[misc]

    def _initialize_and_run_controller(self, **settings: object) -> Any:
        policy = settings["scaling_policy"]
        if not self.has_autoscaler and isinstance(policy, FixedScalingPolicy):
            settings["scaling_policy"] = WithoutAutoscaler(policy.scaling_config)
        elif isinstance(policy, ElasticScalingPolicy):
            settings["scaling_policy"] = EvenRanks(policy.scaling_config, self.sharing)
        return super()._initialize_and_run_controller(**settings)  # type: ignore[misc]


def train_ranks(start: RankStart, nodes: list[str] | None, private: bool, has_dashboard: bool) -> BaseException | None:
    """Start the ranks and wait for their end. Returns what ended them, if they failed. `nodes`, `private`: see `RankRun`."""
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
            has_dashboard=not private and has_dashboard,
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
    except BaseException as error:  # of any type: the driver tells the user of it
        return root_failure(error)
    return None


def root_failure(error: BaseException) -> BaseException:
    """Return the error that a rank or Ray Train's controller raised, of those that are wrapped around it."""
    failures = getattr(error, "worker_failures", None)
    return next(iter(failures.values())) if failures else getattr(error, "controller_failure", error)
