"""Our policy: criticality decides who shares an actor, progress revises it, and moves must pay for themselves."""

from __future__ import annotations

from placement.forecast.group_conditioning import group_error_correlation
from placement.forecast.remaining_length import MIN_SPREAD, Forecast
from placement.migration.decide_moves import LiveState, decide_moves
from placement.migration.move_search import Settings
from placement.simulate.rollout.view import Action, RolloutJob, View, cost_weight_of


class Ours:
    """Call `decide_moves` at every replan. `prefer` sets cost_weight.

    uninformative_share: share of sequences whose forecast is treated as uninformative (None: estimated). learn: correct
    the forecast during the rollout.
    """

    def __init__(
        self, job: RolloutJob, *, uninformative_share: float | None = None, learn: bool = True, least_spread: float = MIN_SPREAD
    ) -> None:
        self.job = job
        self.forecast = Forecast.from_scenarios(job.scenarios, least_spread)
        self.group_correlation = 0.0 if job.group is None else group_error_correlation(job.scenarios, job.group)
        self.settings = Settings(cost_weight_of(job), job.max_actors, job.migrate_s, job.start_s, uninformative_share, learn)

    def decide(self, view: View) -> Action | None:
        live = view.live
        context = float((view.generated + self.job.prompts)[live].mean())
        opened = tuple(sorted(view.ready_s))
        state = LiveState(self.forecast, view.generated, view.finished, view.actor, opened, context, self.job.group, self.group_correlation)
        moves = decide_moves(state, self.job.speed, self.settings)
        return Action(moves.actor, moves.reason) if moves.moves else None
