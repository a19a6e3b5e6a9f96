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
    copy, done = copy_to(ref, here)
    return copy, [done]


def copy_to(ref: object, node: str) -> tuple[Any, Any]:
    """Return a copy of the object on a node, made in the background, and a reference to wait for.

    Ray pulls an object from any node that has it, drawn at random. One that is copied on a node first is pulled from there.
    """
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    copied: Any = _copy  # its annotations allow one return value only
    copy, done = copied.options(scheduling_strategy=strategy, num_returns=2).remote(ref)
    return copy, done


@ray.remote(num_cpus=0, max_retries=0)
def _copy(content: object) -> tuple[Any, bool]:
    return content, True
