"""The planner: pure Python and numpy. Imports neither ray nor torch nor rlhfless_ray."""

from placement.bounds import Bounds, cost_bound, rollout_bounds
from placement.choice import Choice, NotFeasible, Objective, choose, choose_nearest
from placement.frontier import frontier
from placement.plan import Plan, Pool
from placement.rollout_sim import simulate_rollout
from placement.speed import Speed
from placement.step import StepPlan, StepWork, step_bounds, step_frontier

__all__ = [
    "Bounds", "Choice", "NotFeasible", "Objective", "Plan", "Pool", "Speed", "StepPlan", "StepWork", "choose",
    "choose_nearest", "cost_bound", "frontier", "rollout_bounds", "simulate_rollout", "step_bounds",
    "step_frontier",
]
