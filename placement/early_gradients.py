"""Decide whether gradients may be taken while other responses of the batch are still generated.

The runtime (`rlhfless_ray/learn/overlap_rules.py`) and the simulator's policy "as built" both read this.
"""

from __future__ import annotations

from enum import Enum


class Obstacle(Enum):
    """Why the gradients of a part of the batch do not add up to those of the whole batch."""

    UPDATES = "a later update needs weights that the first one must have changed already"
    CRITIC = "the critic values the whole batch first"
    WHOLE_BATCH = "an advantage depends on all rewards of the batch"
    SHARDED_WEIGHTS = "DeepSpeed has no hook to divide its gradients before the step"


def early_gradient_obstacle(*, updates: int, critic: bool, whole_batch: bool, sharded_weights: bool) -> Obstacle | None:
    """Return why the runtime takes no gradients early, or None if it does.

    Args:
        updates: optimizer steps that learn from one rollout.
        critic: whether advantages need a critic's values.
        whole_batch: whether an advantage depends on all rewards of the batch.
        sharded_weights: whether the learner's weights are sharded (ZeRO 3).
    """
    if updates > 1:
        return Obstacle.UPDATES
    if critic:
        return Obstacle.CRITIC
    if whole_batch:
        return Obstacle.WHOLE_BATCH
    return Obstacle.SHARDED_WEIGHTS if sharded_weights else None
