"""Objects that must outlive the node they were made on."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def kept_here(ref: Any, node: str) -> tuple[Any, list[Any]]:
    """The object on the driver's node, where it ends with the driver only, and references that tell when it is there. It is
    being made on `node`; where that is another one a process of its own copies it, so that nobody waits."""
    here = ray.get_runtime_context().get_node_id()
    if node == here:
        return ref, []
    strategy = NodeAffinitySchedulingStrategy(here, soft=False)
    copied: Any = _copied  # its annotations know one return value only
    copy, done = copied.options(scheduling_strategy=strategy, num_returns=2).remote(ref)
    return copy, [done]


@ray.remote(num_cpus=0, max_retries=0)
def _copied(content: Any) -> tuple[Any, bool]:
    return content, True
