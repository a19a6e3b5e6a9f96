"""Size the learner: the slots of a rank, with the engines of the rollout beside its update, and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from placement.planning.partition import pareto
from placement.planning.plan import Plan
from placement.scaling.engine_width import slots
from placement.scaling.learner_ranks import LearnerRanks
from placement.scaling.learner_size import decision_for
from placement.scaling.overlapped_step import Rest, Sizes, Update, size_together, step_plan
from placement.scaling.resize_policy import Decision, Hold
from rlhfless_ray.autoscaler.criteria import MIN_SECOND_VALUE, Criteria
from rlhfless_ray.autoscaler.predictor import Predictor


class LearnerSizing:
    """The learner's ranks, and their slots for an update beside a rollout, by the times that a run has measured."""

    def __init__(self, predictor: Predictor, criteria: Criteria) -> None:
        self.predictor, self.criteria = predictor, criteria
        self.sizes: Sizes | None = None  # of the next update and the rollout beside it, with a lag

    def together(
        self,
        lengths: np.ndarray,
        rooms: Mapping[int, Mapping[int, int]],
        rest: Rest | None,
        frontier: Callable[[int, int], list[Plan]],
        started: Callable[[int, Plan], Plan],
    ) -> Sizes | None:
        """Choose the learner's slots for the update on the planned step's responses, and the engines beside it.

        The rollout beside that update has other prompts, which are not known yet. Its responses are taken to be as long as those of
        the planned step. Returns None if there is no choice, or until every number of slots is measured.

        `frontier`: plans of at most so many engines of a width. `started`: adds to a plan of a width the starts that it needs.
        """
        if len(rooms) < 2 or self.predictor.learner.trial(self.predictor.learner_slots, 0.0) is not None:
            return None
        tokens, ranks = float(lengths.mean(1).sum()), self.predictor.ranks
        pairs: list[tuple[Update, int, Plan]] = []  # the update, the engines' width and their plan
        for per_rank, by_width in rooms.items():
            update = self.predictor.update_of(per_rank, per_rank * ranks, tokens, lengths, rest)
            for width, most in by_width.items():
                if most >= self.criteria.least:
                    pairs += [(update, width, plan) for plan in frontier(most, width)]
        if self.criteria.bids is not None and pairs:
            figures = [
                (update.slots + plan.actors * width, step_plan(plan, update, self.criteria.objective)) for update, width, plan in pairs
            ]
            with_widths = zip(figures, pairs, strict=True)
            with_starts = [started(width, one) for (_, one), (_, width, _) in with_widths]
            room = self.criteria.bids.room_for_pairs(figures, with_starts)
            pairs = [pair for pair, (count, _) in zip(pairs, figures, strict=True) if count <= room]
        plans: dict[Update, list[Plan]] = {}
        for update, _, plan in pairs:
            plans.setdefault(update, []).append(plan)
        undominated = {update: pareto(found) for update, found in plans.items()}
        return size_together(undominated, self.criteria.objective, self.predictor.learner_slots * ranks) if plans else None

    def choose_ranks(self, candidates: Sequence[int]) -> None:
        """Choose among these numbers of learner ranks from now on, of which the first is the present one."""
        recipe = self.predictor.recipe
        self.predictor.learners = LearnerRanks(candidates, recipe.learner.max_slots_per_rank, fixed=recipe.run.exact)

    def use_ranks(self, ranks: int) -> None:
        """Plan for another number of learner ranks from now on. The first update on them uses all slots that it can get."""
        self.predictor.learners.current = ranks
        self.sizes = None
        if self.criteria.bids is not None:
            self.criteria.bids.learner_ranks = ranks

    def decide_ranks(self, step: int, room: int) -> Decision:
        """Decide the number of learner ranks for the updates after this step's, by an update like its own. `room`: slots for them."""
        now = self.predictor.ranks
        if not self.predictor.recipe.functions.elastic:
            return Hold(now, f"{now}: functions.elastic is off")
        if self.predictor.recipe.rollout.rolls_out_ahead:
            return Hold(now, f"{now}: engines work beside updates, and are sized for the slots that these leave")
        if self.criteria.bids is not None and not self.criteria.bids.alone:
            return Hold(now, f"{now}: other runs share the pool")
        return self.predictor.safely(
            "choosing the learner's ranks",
            lambda: self.predictor.learners.decide(
                self.predictor.update_tokens,
                step=step,
                steps_left=self.predictor.recipe.run.steps - step,
                room=room,
                rest=self.predictor.rest_of_step,
                objective=self.criteria.objective,
                value_per_s=max(self.criteria.value_per_s, MIN_SECOND_VALUE),
                change_s=self.predictor.terms.reshard.predict(),
                gamma=self.predictor.recipe.objective.payback,
            ),
            lambda: Hold(now, f"{now} as before: choosing the learner's ranks failed"),
        )

    @property
    def may_retry(self) -> bool:
        """Whether a number of the learner's slots that seems worse may be tried again now.

        Beside other runs it may not: the pool would not grant slots that no bid asks for, and the trial would be due in every step.
        """
        return self.criteria.bids is None or self.criteria.bids.alone

    def beside_rollout(self, tokens: float) -> Decision:
        """Decide the number of slots per rank for an update beside a rollout: it was sized together with the engines."""
        now = self.predictor.learner_slots
        if (trial := self.predictor.learner.trial(now, tokens)) is not None:
            return trial
        if len(self.predictor.learner.counts) == 1:
            reason = f"{slots(now)} a rank, as learner.max_slots_per_rank says; engines are sized for an update on them"
            return decision_for(now, now, reason, self.predictor.learner.predict(now, tokens))
        if self.sizes is None:
            return Hold(now, "as before: learner and engines were not sized together yet")
        ranks = self.predictor.ranks
        per_rank, costs = self.sizes.update.slots // ranks, {count // ranks: cost for count, cost in self.sizes.costs.items()}
        if self.may_retry and (retrial := self.predictor.learner.retrial(per_rank, now, tokens, costs)) is not None:
            return retrial
        return decision_for(per_rank, now, self.sizes.reason, self.predictor.learner.predict(per_rank, tokens))
