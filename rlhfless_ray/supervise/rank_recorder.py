"""Record the reports of a supervised stage's ranks in the run folder: metrics, ledger, status and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.local.memory_watch import MemoryWatch, memory_metrics, summed_peaks
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.report.metrics import Metrics
from rlhfless_ray.report.progress_display import ProgressDisplay
from rlhfless_ray.run.folder import RunFolder

if TYPE_CHECKING:
    from rlhfless_ray.supervise.leased_ranks import LeasedRanks


DRIVER = -1  # in the place of a rank


class RankRecorder:
    """Records the reports of the ranks. A report of kind `step` is handled by `_on_step`, and so on."""

    def __init__(self, recipe: SupervisedRecipe, folder: RunFolder, progress: ProgressDisplay, ledger: Ledger, slots: LeasedRanks) -> None:
        self.recipe, self.folder, self.progress, self.ledger, self.slots = recipe, folder, progress, ledger, slots
        self.memory: MemoryWatch | None = None  # of the driver's node
        self.expected_mb: tuple[dict[str, float], dict[str, float]] = {}, {}  # least and predicted, of each function
        self.peaks: dict[int, dict[str, float]] = {}  # the newest of the driver's node, and of each rank on another one
        self.steps = recipe.run.steps or 0
        self.leases_of: dict[int, list[str]] = {}  # ids of the leases of each rank that has started
        self.done = 0
        self.opened = False  # whether the ranks have loaded the model
        self.began, self.heard_s = False, 0.0  # whether a rank has started; when the ranks reported last
        self.skipped_in_a_row = 0  # optimizer steps
        self.lost, self.restarts = 0, False  # since the last row; whether the ranks have not opened since then

    def open(self, done: int | None) -> None:
        """Open metrics and ledger, of a run that is resumed after the step `done`."""
        self._open_metrics(done)
        for message in self.ledger.resume_from(self.folder.path / "ledger.csv", self.done):
            self.progress.message(message)

    def _open_metrics(self, done: int | None) -> None:
        """Open the metrics after the step `done`; rows of later ones are dropped."""
        folder = self.folder.path
        self.metrics = Metrics(folder, self.recipe.watch, resume_after_step=done, say=self.progress.message)
        self.done, self.counted, self.opened = done or 0, self.ledger.count, False

    def begin_ranks(self) -> None:
        """Expect reports of ranks that start now."""
        self.leases_of.clear()
        self.peaks.clear()
        self.progress.phase("starting the ranks")
        self.began, self.heard_s = False, time.monotonic()

    def record(self, kind: str, content: object) -> None:
        self.heard_s = time.monotonic()
        getattr(self, f"_on_{kind}")(content)

    def note_loss(self, message: str) -> None:
        self.restarts, self.opened = True, False
        self.lost += 1
        self.progress.message(message)

    def _begin_step(self, step: int, at_s: float) -> None:
        """Begin a step in the ledger. What follows the last step belongs to it."""
        self.ledger.begin_step(min(step, self.steps), at_s)

    def check_deadline(self) -> None:
        """Raise RunError if the ranks have not started, or have told nothing, for longer than the recipe allows."""
        key, what = ("learner.deadline_s", "the ranks to go on") if self.began else ("functions.lease_deadline_s", "the ranks to start")
        limit_s = self.recipe.learner.deadline_s if self.began else self.recipe.functions.lease_deadline_s
        if time.monotonic() - self.heard_s > limit_s:
            raise RunError(f"timed out after {limit_s:.0f} s waiting for {what} ({key})")

    def _on_opened(self, done: int) -> None:
        """The ranks go on after the step `done`: that of the last checkpoint that Ray Train counts as whole."""
        if done == self.done and not self.restarts:
            return
        self.metrics.close()
        self._open_metrics(done)
        file, started_s = self.folder.path / "ledger.csv", self.ledger.started_s
        self.ledger.append_to(file)
        self.ledger.resume_from(file, done)  # marks later rows as repeated
        self.ledger.started_s, self.restarts = started_s, False
        self.progress.message(f"the ranks go on after step {done}")

    def _on_alive(self, _: None) -> None:
        """A rank is at a long piece of work."""

    def _on_began(self, content: tuple[int, str, str, int, float]) -> None:
        """A rank has started."""
        rank, node, device, process, began_s = content
        self.began = True
        self.leases_of[rank] = self.slots.assign(rank, node, device, process, began_s)
        self.progress.phase("opening the model")

    def _on_note(self, sentence: str) -> None:
        self.progress.message(sentence, once=True)

    def _on_spans(self, content: tuple[int, Any]) -> None:
        rank, spans = content
        self.ledger.spans(self.leases_of.get(rank, []), spans)
        if not self.opened:
            self.opened = True
            self._begin_step(self.done + 1, spans[-1].to_s)
            self.counted = self.ledger.count

    def _on_memory(self, content: tuple[int, dict[str, float]]) -> None:
        """Peaks of a rank on a node where the driver is not, see `MemoryWatch.take`."""
        rank, peaks = content
        if peaks:  # none: it took no sample since its last report
            self.peaks[rank] = peaks

    def _on_step(self, content: tuple[int, dict[str, float], str, float]) -> None:
        done, measured, skipped, ended_s = content
        self._begin_step(done + 1, ended_s)
        own, total = self.ledger.totals_since(self.counted), self.ledger.totals()
        self.counted = self.ledger.count
        row = {
            "step": done,
            "time_s": time.time() - self.ledger.started_s,
            **measured,
            "cost/busy_slot_s": own["busy_slot_s"],
            "cost/full_slot_s": own["full_slot_s"],
            "cost/idle_share": own["idle_share"],
            "cost/money": own["money"],
            "cost/total_full_slot_s": total["full_slot_s"],
            "cost/total_money": total["money"],
            "faults/replaced": self.lost,
            "time_left_s": measured["step_s"] * (self.steps - done),
        }
        if self.memory is not None:
            self._on_memory((DRIVER, self.memory.take()))
            row |= memory_metrics(summed_peaks(self.peaks.values()), *self.expected_mb)
        self.slots.expect(row["time_left_s"])
        row |= self.slots.metrics()
        if skipped:
            self.progress.message(f"step {done}: the update was skipped: {skipped}")
        self.lost = 0
        self.metrics.write(row)
        self.ledger.append_to(self.folder.path / "ledger.csv")
        self.folder.write_status(steps_done=done)
        self.progress.step(row)
        self.progress.phase("training")
        self.done = done
        self.skipped_in_a_row, most = self.skipped_in_a_row + 1 if skipped else 0, self.recipe.learner.max_skipped_updates
        if self.skipped_in_a_row > most:
            raise RunError(
                f"{self.skipped_in_a_row} optimizer steps in a row were skipped (learner.max_skipped_updates = {most}): {skipped}; lower "
                "learner.learning_rate"
            )

    def _on_evaluation(self, content: tuple[int, dict[str, float]]) -> None:
        step, found = content
        self.metrics.amend({"step": step, "time_s": time.time() - self.ledger.started_s, **found})
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items())
        self.progress.message(f"step {step}: held-out {shown}")

    def _on_saved(self, step: int) -> None:
        self.progress.phase("training")

    def last_works(self) -> Iterator[Callable[[], object]]:
        """Yield what is still to be written at the end, piece by piece, for a disk that may be full."""
        self.ledger.close()
        yield lambda: self.ledger.append_to(self.folder.path / "ledger.csv")
        if hasattr(self, "metrics"):
            yield self.metrics.close
