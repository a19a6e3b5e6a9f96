"""A rollout that gives engines up at planned moments, so that the learner can have their devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from placement.migration.decide_moves import relabel
from placement.simulate.rollout import make_policy
from placement.simulate.rollout.ours import Ours
from placement.simulate.rollout.view import Action, RolloutJob, View


@dataclass(frozen=True)
class Narrowing:
    """Allow at most `engines` engines once this share of the responses has ended."""

    share: float
    engines: int


class Narrowed:
    """A named rollout policy with fewer engines from a `Narrowing` on.

    At that moment the live sequences are split over fewer engines, keeping as many as possible where they
    are. The policy goes on from there. It never sees more engines than it may use: actor numbers are translated both
    ways.
    """

    def __init__(self, name: str, job: RolloutJob, narrowing: Narrowing | None) -> None:
        self.name, self.job, self.narrowing = name, job, narrowing
        self.inner = make_policy(name, job)
        self.actors = np.arange(job.max_actors)  # of the inner policy's numbers

    def decide(self, view: View) -> Action | None:
        if self.narrowing is None or view.finished.mean() < self.narrowing.share or self.narrowing.engines >= len(self.actors):
            if len(self.actors) == self.job.max_actors:  # not narrowed yet: the inner policy's numbers are those of the view
                return self.inner.decide(view)  # type: ignore[attr-defined,no-any-return]
            return self._translated(self.inner.decide(self._seen(view)))  # type: ignore[attr-defined]
        live, limit, self.narrowing = view.live, self.narrowing.engines, None
        self.inner = self._narrower(limit)
        # Ask as at the beginning of a rollout: where would each live sequence go if none were placed yet?
        fresh = replace(view, job=self.job, time_s=0.0, actor=np.full(len(view.finished), -1), ready_s={})
        wanted = self.inner.decide(fresh)  # type: ignore[attr-defined]
        group = np.unique(wanted.actor[live], return_inverse=True)[1]
        actor = np.full(len(view.finished), -1)
        actor[live] = relabel(group, view.actor[live], tuple(sorted(view.ready_s)), self.job.max_actors)
        used = np.unique(actor[live])
        others = [a for a in sorted(self.actors, key=lambda a: (a not in view.ready_s, a)) if a not in used]
        self.actors = np.r_[used, others[: limit - len(used)]].astype(int)
        return Action(actor, f"{len(live)} live on at most {limit} actors: the learner takes the other devices")

    def _narrower(self, limit: int) -> object:
        job = replace(self.job, max_actors=limit)
        if self.name == "oracle":  # its plan is for a whole rollout, and this one has begun
            return Ours(job, is_known=True)
        return make_policy(self.name, job)

    def _seen(self, view: View) -> View:
        number = np.full(self.job.max_actors + 1, -1)  # the last entry stands for actor -1
        number[self.actors] = np.arange(len(self.actors))
        ready = {int(number[a]): at for a, at in view.ready_s.items() if number[a] >= 0}
        return replace(view, actor=number[view.actor], ready_s=ready)

    def _translated(self, action: Action | None) -> Action | None:
        if action is None:
            return None
        actor = np.where(action.actor < 0, -1, self.actors[action.actor])
        return Action(actor, action.reason, frozenset(int(self.actors[a]) for a in action.hold))
