"""The planner: pure Python and numpy. Imports neither ray nor torch nor rlhfless_ray."""

from placement.plan import Plan, Pool
from placement.rollout_sim import simulate_rollout
from placement.speed import Speed

__all__ = ["Plan", "Pool", "Speed", "simulate_rollout"]
