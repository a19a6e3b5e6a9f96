"""What checkpoints hold of a run: the driver's state beside the learner's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from rlhfless_ray.autoscaler.oversample import StaleCost
from rlhfless_ray.common.disk_space import DiskFull
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.run.checkpoints import Best, Checkpoints
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.runtime.export import trained_policy
from rlhfless_ray.runtime.run_inputs import RunInputs
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.types import Group
from rlhfless_ray.weights.remote_folder import writer
from rlhfless_ray.weights.same_model import model_sizes

FAILED_SAVE_S = 30.0  # timeout for the learner's state after a failure


class Stateful(Protocol):
    def state(self) -> JsonObject: ...
    def restore(self, state: JsonObject) -> None: ...


@dataclass(frozen=True)
class StepsDone:
    """The driver's state after the last finished step, from which a stop inside a step repeats the whole step."""

    cursor: JsonObject = field(default_factory=dict)
    refill: Sequence[list[JsonObject]] = ()  # surplus groups
    in_flight: Sequence[Group] = ()  # groups of later steps that have begun


class SavedState:
    def __init__(
        self,
        stages: Stages,
        session: RolloutSession,
        folder: RunFolder,
        inputs: RunInputs,
        steps_done: int,
        *,
        resume_changed: bool = False,
    ) -> None:
        """`resume_changed`: accept a checkpoint of a recipe that learns or counts something else."""
        self.stages, self.session, self.folder, self.inputs = stages, session, folder, inputs
        self.steps_done, self.resume_changed = steps_done, resume_changed
        section = stages.context.recipe.checkpoint
        self.checkpoints, self.best = Checkpoints(section, folder.path), Best(section.best_metric)
        self.saved = -1  # step of the newest checkpoint
        self.owes_evaluation = True  # whether one is due before the next step: the first, or one that a stop interrupted
        self.done = StepsDone(session.source.cursor.state())

    def driver(self) -> JsonObject:
        """Return the driver's state after the last finished step as JSON-serialisable values."""
        stages, groups = self.stages, self.session.groups
        return {
            "step": self.steps_done,
            "version": self.session.weights.version if self.session.weights else 0,
            "cursor": self.done.cursor,
            "refill": self.done.refill,
            **({"in_flight": groups.state(self.done.in_flight)} if self.done.in_flight else {}),
            "stale_cost": asdict(groups.stale_cost),
            "autoscaler": self.stages.context.autoscaler.state(),
            **{name: part.state() for name, part in self._measured().items()},
            "skipped_in_a_row": stages.learn.worker_group.skipped_in_a_row,
            "owes_evaluation": self.owes_evaluation,
            "best_value": self.best.value,
            "model": model_sizes(self.inputs.files),
            "run_folder": str(self.folder.path.resolve()),
            "recipe": self.stages.context.recipe.model_dump(mode="json"),
            "contents": dict(self.inputs.contents),
            "ledger_rows": self.stages.context.ledger.saved_rows,
        }

    def _measured(self) -> dict[str, Stateful]:
        """Return what stages know from earlier steps, by its name in a checkpoint."""
        rollout, prefix = self.stages.rollout, self.stages.prefix
        speed = prefix.speed if prefix is not None else None
        found: dict[str, Stateful | None] = {"learning": self.stages.learn, "moves": rollout, "drafts": rollout.drafts, "prefix": speed}
        return {name: part for name, part in found.items() if part is not None}

    def restore_rows(self, state: JsonObject) -> None:
        """Restore the place in the rows. Groups of other rows than those of now, which --resume-changed accepts, are dropped."""
        rows, cursor = state["cursor"], self.session.source.cursor
        if self.resume_changed and not cursor.has_same_rows(rows):
            dropped = [name for name in ("refill", "ahead", "in_flight") if state.pop(name, None)]
            if dropped:
                self.stages.context.say("responses to the earlier training prompts, which the checkpoint holds, are dropped")
        cursor.restore(rows, check=not self.resume_changed)

    def restore(self, state: JsonObject) -> None:
        """Restore a driver's state. Raises UserError if it is from another version of this program."""
        self.restore_rows(state)
        source, groups, train = self.session.source, self.session.groups, self.inputs.prompts.train
        if self.stages.context.recipe.algorithm.filter_range is not None:
            source.dynamic_sampling.restore(state.get("refill", []), train)
        if begun := state.get("in_flight"):
            groups.restore(begun, train)
        if ahead := state.get("ahead"):  # of an older version
            groups.restore_ahead(ahead, self.steps_done + 1, source.cursor, train)
        self.done = StepsDone(source.cursor.state(), source.dynamic_sampling.state(), groups.in_flight)
        groups.stale_cost = StaleCost(**state.get("stale_cost", {}))
        try:
            self.stages.context.autoscaler.restore(state["autoscaler"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"--resume: the checkpoint's planner state is of another version of this program ({error}); start a new run under another "
                "run.name"
            ) from None
        for name, part in self._measured().items():
            part.restore(state.get(name, {}))
        self.stages.learn.worker_group.skipped_in_a_row = state["skipped_in_a_row"]
        self.owes_evaluation = state.get("owes_evaluation", self.steps_done == 0)
        if not self.owes_evaluation:  # a stop before the next step must not rewrite the checkpoint, which would lose its metric
            self.saved = self.steps_done
        self.best.value = state.get("best_value")

    def is_due(self, number: int) -> bool:
        """Return whether a checkpoint is due after a step."""
        return number % self.stages.context.recipe.checkpoint.every_steps == 0 or number == self.session.last_step

    def save(
        self,
        deadline_s: float | None = None,
        *,
        metric: tuple[str, float] | None = None,
        best: bool = False,
        export: bool = False,
        learned: bool = True,
    ) -> None:
        """Save a checkpoint. Without a learner there is none, and responses are on disk already.

        `metric`: (name, value) of this step's evaluation. `best`: whether it is the best so far. `export`: write a model folder if the
        recipe asks for it. `learned`: False if the learner still has the weights of `policy.path`, so that no state is saved.
        """
        recipe, stages, groups = self.stages.context.recipe, self.stages, self.stages.learn.worker_groups
        self.stages.context.record.catch_up()  # a resumed run needs all rows of the ledger
        if not recipe.learns:
            return

        def learner(folder: Path) -> dict[str, str]:
            if not learned:
                return {}
            large = {**stages.learn.files(), **stages.rollout.files()}
            return groups.save(folder, deadline_s) | writer(large)(folder)

        state, exports = self.driver(), self.checkpoints.exports
        model = trained_policy(recipe, self.folder, self.inputs.files, stages.learn.worker_group) if exports else None
        self.checkpoints.save(self.steps_done, learner, state, metric, model if export else None)
        if best and metric is not None:
            self.checkpoints.save_best(self.steps_done, learner, state, metric, model)
        if recipe.checkpoint.resumable and learned:
            groups.saved(lambda: self.checkpoints.load()[1])
        self.saved = self.steps_done
        self.stages.context.record.checkpointed()

    def save_unless_saved(self, deadline_s: float | None) -> None:
        """Save the last finished step after a stop, unless it is saved."""
        if self.session.weights is not None and self.saved != self.steps_done:  # no weights yet: the learner was not built
            self.save(deadline_s)

    def save_kept(self) -> None:
        """Save the last finished step after a failure, unless it is saved or its state is only in the learner, which may have failed."""
        is_kept, record = self.session.weights is not None and self.stages.learn.worker_groups.kept_now, self.stages.context.record
        if not is_kept or self.session.step.is_unrecorded or self.saved == self.steps_done:
            return
        while record.later:
            with suppress(DiskFull):  # the checkpoint is more important than rows
                record.catch_up()
        self.save(FAILED_SAVE_S)
        self.stages.context.say(f"step {self.steps_done} is saved: --resume continues from there")
