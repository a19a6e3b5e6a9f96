"""The run with replayed functions. With it, the actors' processes would import the whole driver, 0.3 CPU seconds in each."""

from __future__ import annotations

from benchmarks.common.replay import ReplayedEngineActor, ReplayedLearner
from rlhfless_ray.reward.reward_actor import RewardActor
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.runtime.worker_pools import ActorClasses


class ReplayedRuntime(Runtime):
    """The runtime itself, with replayed engines and learner."""

    def actor_classes(self) -> ActorClasses:
        return ActorClasses(ReplayedEngineActor, RewardActor, ReplayedLearner, computes=False)
