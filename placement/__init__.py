"""The planner: pure Python and numpy. Imports neither ray nor torch nor rlhfless_ray."""

from placement.bounds import Bounds, cost_bound, rollout_bounds
from placement.choice import Choice, NotFeasible, Objective, choose, choose_nearest
from placement.frontier import frontier
from placement.lengths import ForecastQuality, LengthForecast, LengthForecaster, Scenarios, forecast_quality, revise
from placement.plan import Plan, Pool
from placement.price import PriceTable
from placement.rollout_sim import simulate_rollout
from placement.roofline import Device, Model, decode_speed, kv_capacity
from placement.speed import Speed, SpeedFit
from placement.step import StepPlan, StepWork, step_bounds, step_frontier
from placement.terms import Term, Terms

__all__ = [
    "Bounds", "Choice", "Device", "ForecastQuality", "LengthForecast", "LengthForecaster", "Model", "NotFeasible",
    "Objective", "Plan", "Pool", "PriceTable", "Scenarios", "Speed", "SpeedFit", "StepPlan", "StepWork", "Term",
    "Terms", "choose", "choose_nearest", "cost_bound", "decode_speed", "forecast_quality", "frontier", "kv_capacity",
    "revise", "rollout_bounds", "simulate_rollout", "step_bounds", "step_frontier",
]
