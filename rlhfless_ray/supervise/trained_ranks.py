"""Train a supervised stage's ranks to the end: start them, record what they tell, and start them again."""

from __future__ import annotations

import time
from dataclasses import replace

from rlhfless_ray.common.deadlines import POLL_S, STOP
from rlhfless_ray.common.errors import Stopped
from rlhfless_ray.supervise.find_checkpoints import steps_saved
from rlhfless_ray.supervise.leased_ranks import LeasedRanks
from rlhfless_ray.supervise.rank_recorder import RankRecorder
from rlhfless_ray.supervise.rank_run import RankRun, RanksFailed
from rlhfless_ray.supervise.rank_start import RankStart

STOP_S = 60.0  # time for the ranks to finish their step and save after Ctrl-C


class TrainedRanks:
    """The ranks start again after a loss, and in another number if there are more slots or other runs want some."""

    def __init__(self, start: RankStart, slots: LeasedRanks, recorder: RankRecorder, private: bool) -> None:
        """`private`: see `RankRun`."""
        self.start, self.slots, self.recorder, self.private = start, slots, recorder, private
        self.progress, self.steps = recorder.progress, recorder.steps

    def run(self) -> None:
        losses = 0
        while True:
            self.progress.phase("waiting for slots")
            try:
                changes = self._run_once(self.slots.take())
                if not changes or self.recorder.done == self.steps:
                    return
            except RanksFailed as error:
                losses += 1
                if losses > self.start.recipe.run.max_restarts:
                    raise
                self.recorder.note_loss(f"the ranks start again from the last checkpoint: {error}")
            finally:
                self.slots.release()

    def _run_once(self, nodes: list[str]) -> bool:
        """Run the ranks on these nodes, and record what they tell until they have ended. Raises what ended them.

        Returns whether they ended in order to start again in another number.
        """
        self.recorder.begin_ranks()
        ranks = RankRun(replace(self.start, devices=self.slots.devices), nodes, self.private)
        try:
            stopped, changes = self._watch(ranks)
        except BaseException:
            ranks.kill()  # their slots are released next
            raise
        ranks.close()
        if stopped is not None and self.recorder.done < self.steps:
            stopped.resumable = steps_saved(self.start.storage) is not None
            raise stopped
        ranks.raise_failure(self.start.storage)
        return changes

    def _watch(self, ranks: RankRun) -> tuple[Stopped | None, bool]:
        """Record what the ranks tell until they have ended. Returns who stopped them, and whether they start again in another number."""
        stopped: Stopped | None = None
        stopped_s, changes = 0.0, False
        while True:
            has_ended = not ranks.is_alive
            for kind, content in ranks.take_reports():
                self.recorder.record(kind, content)
            if has_ended:
                return stopped, changes
            if stopped is None and STOP.number is not None:
                stopped, stopped_s = Stopped(STOP.number), time.monotonic()
                self.progress.message("stopping once this step is finished and saved; press Ctrl-C again to stop now")
                ranks.stop()
                STOP.acknowledge()
            elif stopped is not None:
                if STOP.number is not None or time.monotonic() - stopped_s > STOP_S:
                    raise stopped
            elif self.recorder.opened and not changes and (reason := self.slots.change()):
                self.progress.message(reason)
                ranks.stop()
                changes = True
            self.recorder.check_deadline()
            time.sleep(POLL_S)
