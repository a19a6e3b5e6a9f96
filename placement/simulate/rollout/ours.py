"""Our policy: consolidation, with shares by the forecast where moves are free and it has proved right."""

from __future__ import annotations

from placement.forecast.scenarios import Scenarios
from placement.migration.decide_moves import LiveState, Settings, decide_moves
from placement.simulate.rollout.consolidate import Consolidate
from placement.simulate.rollout.view import Action, RolloutJob, View, cost_weight_of


class Ours:
    """Consolidate where moves or starts cost something: what forecasts add there is less than what they lose where they are wrong.

    Otherwise call `decide_moves` at every replan. `prefer` sets cost_weight. `is_known`: the only scenario is the truth, so it is always
    called.
    """

    def __init__(self, job: RolloutJob, *, is_known: bool = False) -> None:
        self.job, self.forecast = job, None if is_known else Scenarios.from_matrix(job.scenarios)
        self.consolidate = None if is_known or not (job.migrate_s or job.start_s) else Consolidate(job)
        self.settings = Settings(cost_weight_of(job), job.max_actors, job.migrate_s, 0.0, job.start_s)

    def decide(self, view: View) -> Action | None:
        if self.consolidate is not None:
            return self.consolidate.decide(view)
        live = view.live
        if self.forecast is None:
            left = self.job.scenarios[live] - view.generated[live, None]
        else:
            left = self.forecast.left(view.generated, view.finished)[live]
        context = (view.generated + self.job.prompts)[live]
        moves = decide_moves(LiveState(left, context, view.actor[live], tuple(sorted(view.ready_s))), self.job.speed, self.settings)
        if (moves.actor == view.actor[live]).all():
            return None
        actor = view.actor.copy()
        actor[live] = moves.actor
        return Action(actor, moves.reason)
