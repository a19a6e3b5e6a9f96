"""Plan the rollouts of RLHF: how many engines to lease, which responses each one decodes, and what that takes and costs.

The package needs numpy and scipy only. It imports neither Ray nor torch nor `rlhfless_ray`.

Examples
--------
>>> from placement import Objective, Speed, choose, frontier
>>> plans = frontier([120, 80, 75, 900], Speed(base_s=0.01, per_seq_s=1e-4), max_actors=4)
>>> [(round(plan.time_s, 2), round(plan.cost, 2), plan.actors) for plan in plans]
[(9.09, 10.32, 2), (9.1, 9.92, 2), (9.11, 9.87, 2), (9.12, 9.12, 1)]
>>> choose(plans, Objective(prefer=0.0)).plan.groups
(array([3, 0, 1, 2]),)
"""

from placement.forecast.forecaster import LengthForecaster
from placement.planning.bounds import Bounds, rollout_bounds
from placement.planning.frontier import frontier
from placement.planning.objective import Choice, NotFeasible, Objective, choose, choose_nearest
from placement.planning.plan import Plan, Pool
from placement.speed.decode_speed import Speed

__all__ = [
    "Bounds",
    "Choice",
    "LengthForecaster",
    "NotFeasible",
    "Objective",
    "Plan",
    "Pool",
    "Speed",
    "choose",
    "choose_nearest",
    "frontier",
    "rollout_bounds",
]
