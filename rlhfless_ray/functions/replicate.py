"""Copy objects that must outlive the node on which they were made."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def copy_to_driver_node(ref: object, node: str) -> tuple[Any, list[Any]]:
    """Return a copy of the object on the driver's node, where it lives as long as the driver, and references to wait for.

    The object is being made on `node`. If that is another node, a separate process copies it in the background.
    """
    here = ray.get_runtime_context().get_node_id()
    if node == here:
        return ref, []
    strategy = NodeAffinitySchedulingStrategy(here, soft=False)
    copied: Any = _copy  # its annotations allow one return value only
    copy, done = copied.options(scheduling_strategy=strategy, num_returns=2).remote(ref)
    return copy, [done]


@ray.remote(num_cpus=0, max_retries=0)
def _copy(content: object) -> tuple[Any, bool]:
    return content, True
