"""Devices of a supervised stage's ranks that the pool of the cluster leased. Ray Train knows nothing of them.

Each rank sees its own device only, as engines and learners do. CUDA reads the variable once, so it is set before the process group starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class LeasedTorchConfig(TorchConfig):
    """Ray Train's configuration of PyTorch, with the names of the devices that are leased on each node, by its id."""

    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return LeasedDevices


class LeasedDevices(_TorchBackend):
    """Connects the ranks after each has got its device."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(show_device, backend_config.devices)
        super().on_start(worker_group, backend_config)
        worker_group.execute(use_first_device)


def show_device(devices: Mapping[str, tuple[str, ...]]) -> None:
    """In a rank: make its device the only visible one."""
    node, number = ray.get_runtime_context().get_node_id(), ray.train.get_context().get_local_rank()
    os.environ[VISIBLE] = devices[node][number]


def use_first_device() -> None:
    """In a rank: name its device by its place among the visible ones, where Ray Train counts the ranks of the node."""
    os.environ["LOCAL_RANK"] = "0"
