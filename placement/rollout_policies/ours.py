"""Our policy: criticality decides who shares an actor, progress revises it, and moves must pay for themselves."""

from __future__ import annotations

from placement.migrate import LiveState, Settings, decide_moves
from placement.rollout_policies.view import Action, Job, View, weight
from placement.siblings import shared_error
from placement.survival import LEAST_SPREAD, Forecast


class Ours:
    """`placement.migrate.decide_moves` at every replan. Its knob is μ of time + μ·cost.

    surprise: share of sequences whose forecast is taken to say nothing (None: by what forecasts explain); learn: correct
    the forecast in flight.
    """

    def __init__(
        self, job: Job, *, surprise: float | None = None, learn: bool = True, least_spread: float = LEAST_SPREAD
    ) -> None:
        self.job = job
        self.forecast = Forecast.of(job.scenarios, least_spread)
        self.shared = 0.0 if job.group is None else shared_error(job.scenarios, job.group)
        self.settings = Settings(weight(job), job.max_actors, job.migrate_s, job.start_s, surprise, learn)

    def decide(self, view: View) -> Action | None:
        live = view.live
        context = float((view.generated + self.job.prompts)[live].mean())
        opened = tuple(sorted(view.ready_s))
        state = LiveState(self.forecast, view.generated, view.finished, view.actor, opened, context, self.job.group, self.shared)
        moves = decide_moves(state, self.job.speed, self.settings)
        return Action(moves.actor, moves.reason) if moves.moves else None
