"""The planner: pure Python and numpy. Imports neither ray nor torch nor rlhfless_ray."""

from placement.bounds import Bounds, cost_bound, rollout_bounds
from placement.choice import Choice, NotFeasible, Objective, choose, choose_nearest
from placement.frontier import frontier
from placement.lengths import ForecastQuality, LengthForecast, LengthForecaster, Scenarios, forecast_quality, revise
from placement.plan import Plan, Pool
from placement.price import PriceTable
from placement.rollout_sim import simulate_rollout
from placement.speed import Speed, SpeedFit
from placement.step import StepPlan, StepWork, step_bounds, step_frontier
from placement.terms import Term, Terms

__all__ = [
    "Bounds", "Choice", "ForecastQuality", "LengthForecast", "LengthForecaster", "NotFeasible", "Objective", "Plan",
    "Pool", "PriceTable", "Scenarios", "Speed", "SpeedFit", "StepPlan", "StepWork", "Term", "Terms", "choose",
    "choose_nearest", "cost_bound", "forecast_quality", "frontier", "revise", "rollout_bounds", "simulate_rollout",
    "step_bounds", "step_frontier",
]
