"""Score while engines still generate, so that less is left to do after the rollout.

Finished samples are scored as they arrive, and the passes before the update (reference, learner, critic) are computed for them, on slots
that engines have left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlhfless_ray.common.deadlines import wait_any
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.rollout.engine_calls import Ref
from rlhfless_ray.rollout.events import Event, RolloutProgress, RoomNeeded, SamplesMade
from rlhfless_ray.rollout.live_rollout import Plugin
from rlhfless_ray.rollout.trained_drafter import TrainedDrafter
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.types import Sample

ASK_S = 1.0  # pause after a request for free slots got none that fit, because each request waits for up to `FREE_S`
LOOK_SHARE, PAUSE_S = 0.1, 0.05  # share of the driver's time for looks, whose forecasts visit every response; longest pause after one
LOOK_S = 1.0  # longest time between two looks at work: its own deadlines need them


class EarlyWork(Plugin):
    def __init__(
        self,
        scoring: ScoreStage,
        learning: LearnStage,
        broker: SlotBroker,
        batch: RolloutBatch,
        *,
        beside_update: bool = False,
        drafters: Sequence[TrainedDrafter] = (),
        handover_s: float = 0.0,
    ) -> None:
        """Begin the early work of a step.

        Where a rollout cuts responses, this works on the groups that the step will certainly train on (`RolloutBatch.settled`). Engines are
        busy until such a rollout ends, so it also takes free slots that no engine was planned for.

        Args:
            broker: its free leases are those that engines have left.
            beside_update: compute only the learner's passes, on its own slots, once the update under way has ended. Engines keep theirs.
                The last pass may outlive the rollout: the update's result waits for it.
            drafters: are trained on leases that scoring and learning do not need now.
            handover_s: time until another process works under the lease of an engine.
        """
        self.scoring, self.learning, self.broker, self.batch = scoring, learning, broker, batch
        self.beside_update, self.drafters, self.handover_s = beside_update, drafters, handover_s
        if not beside_update:
            scoring.begin(batch.quota * batch.count)
        learning.passes.begin(batch.quota * batch.count)
        self.unscored: list[Sample] = []
        self.scored = 0
        self.finished = {sample.id: sample for key, sample in batch.samples.items() if not batch.unfinished[key]}
        self.complete = 0  # number of complete groups at the last look
        self.settled: set[int] = set()  # settled groups that were admitted
        self.look_at_s = 0.0
        self.ask_at_s = 0.0  # earliest time to ask for free slots again

    def on_event(self, event: Event) -> None:
        if isinstance(event, SamplesMade):
            self.add_samples(event.samples)
        elif isinstance(event, RolloutProgress) and self.rollout.source.has_work() and (began_s := time.monotonic()) >= self.look_at_s:
            self.poll(self.rollout.tail_s())
            if (free := len(self.broker.free)) and self.rollout.decide_lease(free).action == "Release":
                self.broker.release()
            now = time.monotonic()
            self.look_at_s = now + min(PAUSE_S, (now - began_s) / LOOK_SHARE)
        elif isinstance(event, RoomNeeded):
            self._make_room(event.within_s)

    # ---- samples --------------------------------------------------------------------------------------------------

    def add_samples(self, samples: list[Sample]) -> None:
        """Add finished responses."""
        if self.batch.cuts:
            self.finished |= {sample.id: sample for sample in samples}
        else:
            self._admit(samples)

    def _admit(self, samples: list[Sample]) -> None:
        self.learning.passes.add_samples(samples)
        if not self.beside_update:
            self.unscored += samples
        for drafter in self.drafters:
            drafter.add_samples(samples)

    def _admit_settled(self) -> None:
        if self.batch.cuts and len(self.batch.completed) > self.complete:
            self.complete, new = len(self.batch.completed), [g for g in self.batch.settled() if g not in self.settled]
            self.settled.update(new)
            self._admit([self.finished[name] for g in new for name in self.batch.ids_of(g)])

    # ---- slots ----------------------------------------------------------------------------------------------------

    def take(self, number: int, instance: Instance) -> bool:
        """Take over the slot of an idle engine if there is work for it while others decode."""
        if not instance.started or self.rollout.tail_s() < self.handover_s or not self.wants_slot():
            return False
        self.broker.put(self.rollout.settings.park(instance))
        return True

    def wants_slot(self) -> bool:
        """Return whether one more slot would have work."""
        if self.beside_update or self.broker.free:
            return False
        return bool(self.unscored) or self.learning.passes.waiting or any(drafter.wants_slot for drafter in self.drafters)

    def _make_room(self, within_s: float) -> None:
        """Release the slots that engines have left, even if the next phase needs them, and wait for the work on them.

        Raises RunError if it goes on for longer than `within_s`, unless that is 0.
        """
        self.poll(0.0)
        self.broker.release()
        end_s = time.monotonic() + within_s
        while within_s and (refs := self.refs()):
            what = "the end of work beside the rollout, which may hold the only slot that is left"
            wait_any(refs, end_s - time.monotonic(), what, within_s=LOOK_S, of_s=within_s)
            self.poll(0.0)
            self.broker.release()

    # ---- work -----------------------------------------------------------------------------------------------------

    def refs(self) -> list[Ref]:
        return [*self.scoring.refs(), *self.learning.passes.pending(), *(ref for drafter in self.drafters for ref in drafter.refs())]

    def poll(self, seconds: float) -> None:
        """Collect finished work and start more. `seconds`: time for which engines will continue."""
        if self.beside_update:
            self.learning.pass_beside(seconds)
            return
        self._admit_settled()
        taken = self._take_free_slots(seconds) if self.batch.cuts else None
        self._work(seconds)
        if taken is not None and all(lease in self.broker.free for lease in taken):  # `on_event` releases them
            self.ask_at_s = time.monotonic() + ASK_S

    def _work(self, seconds: float) -> None:
        given_back = [*self.scoring.done_ahead(), *self.learning.passes.collect()]  # may also put leases of lost ranks into the broker
        given_back += [lease for drafter in self.drafters for lease in drafter.done_ahead()]
        # A pool would wait for another slot instead of one whose node is lost or drained, and engines may hold every other slot.
        leases = self.broker.leases.without_lost([*self.broker.take(), *given_back])
        if leases and self.unscored and seconds > 0 and self.scoring.fits(leases):
            samples, self.unscored = self.unscored, []
            leases = self.scoring.score_ahead(samples, leases)
            self.scored += len(samples)
        if leases:
            leases = self.learning.passes.start_ahead(leases, seconds)
        for drafter in self.drafters:
            leases = drafter.start_ahead(leases, seconds)
        self.broker.put(leases)

    def _take_free_slots(self, seconds: float) -> list[Lease] | None:
        """Take free slots of the cluster if there is work for them that ends within `seconds`. Returns the leases, or None without work."""
        if self.broker.free or self.scoring.refs() or time.monotonic() < self.ask_at_s:
            return None
        if not (worker_groups := self.learning.passes.with_work(seconds)):
            return None
        leases = self.learning.lease_free_slots(worker_groups)
        self.broker.put(leases)
        return leases

    def finish(self) -> None:
        """End the drafters' training, which may not outlive the rollout. Passes may: waiting for one could replace a lost learner."""
        for drafter in self.drafters:
            self.broker.put(drafter.finish())

    def report(self) -> JsonObject:
        """Return the step's metrics of this work."""
        counts: JsonObject = {"overlap/scored": self.scored}
        for drafter in self.drafters:
            counts |= drafter.metrics()
        return counts | self.learning.passes.metrics()
