"""Save and restore a run's checkpoints: the driver's state beside the learner's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.oversample import StaleCost
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.rollout_stage import RolloutStage
from rlhfless_ray.run.checkpoints import Best, Checkpoints
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.run.recorder import RunRecorder
from rlhfless_ray.runtime.export import trained_policy
from rlhfless_ray.runtime.run_inputs import RunInputs
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.types import Group, WeightVersion
from rlhfless_ray.weights.remote_folder import writer
from rlhfless_ray.weights.same_model import model_sizes


@dataclass(frozen=True)
class StepsDone:
    """The driver's state after the last finished step, from which a stop inside a step repeats the whole step."""

    cursor: dict[str, Any] = field(default_factory=dict)
    refill: Sequence[list[dict[str, Any]]] = ()  # surplus groups
    in_flight: Sequence[Group] = ()  # groups of later steps that have begun


class CheckpointedRun:
    """The parts of a run whose state is saved. `Runtime` creates them."""

    recipe: Recipe
    folder: RunFolder
    checkpoints: Checkpoints
    record: RunRecorder
    inputs: RunInputs
    cursor: Cursor
    dynamic_sampling: DynamicSampling
    groups: GroupsInFlight
    autoscaler: Autoscaler
    stages: Stages
    rollout_stage: RolloutStage
    learn_stage: LearnStage
    worker_group: WorkerGroup
    best: Best
    session: RolloutSession
    ledger: Ledger
    contents: Mapping[str, str]  # key → checksum of what it names
    resume_changed: bool
    steps_done = 0
    saved = -1  # step of the newest checkpoint
    owes_evaluation = True  # whether one is due before the next step: the first, or one that a stop interrupted
    done = StepsDone()

    @property
    def weights(self) -> WeightVersion | None:
        """The newest weights."""
        return self.session.weights

    @weights.setter
    def weights(self, version: WeightVersion | None) -> None:
        self.session.weights = version

    def _driver_state(self) -> dict[str, Any]:
        """Return the driver's state after the last finished step as JSON-serialisable values."""
        return {
            "step": self.steps_done,
            "version": self.weights.version if self.weights else 0,
            "cursor": self.done.cursor,
            "refill": self.done.refill,
            **({"in_flight": self.groups.state(self.done.in_flight)} if self.done.in_flight else {}),
            "stale_cost": asdict(self.groups.stale_cost),
            "autoscaler": self.autoscaler.state(),
            "learning": self.learn_stage.state(),
            "moves": self.rollout_stage.state(),
            **({"drafts": self.rollout_stage.drafts.state()} if self.rollout_stage.drafts is not None else {}),
            "prefix": self.stages.prefix.speed.state() if self.stages.prefix is not None else {},
            "skipped_in_a_row": self.worker_group.skipped_in_a_row,
            "owes_evaluation": self.owes_evaluation,
            "best_value": self.best.value,
            "model": model_sizes(self.inputs.files),
            "run_folder": str(self.folder.path.resolve()),
            "recipe": self.recipe.model_dump(mode="json"),
            "contents": dict(self.contents),
            "ledger_rows": self.ledger.saved_rows,
        }

    def _restore_rows(self, state: dict[str, Any]) -> None:
        """Restore the place in the rows. Groups of other rows than those of now, which --resume-changed accepts, are dropped."""
        rows = state["cursor"]
        if self.resume_changed and not self.cursor.has_same_rows(rows):
            dropped = [name for name in ("refill", "ahead", "in_flight") if state.pop(name, None)]
            if dropped:
                self.record.progress.message("responses to the earlier training prompts, which the checkpoint holds, are dropped")
        self.cursor.restore(rows, check=not self.resume_changed)

    def _restore_driver(self, state: dict[str, Any]) -> None:
        """Restore a driver's state. Raises UserError if it is from another version of this program."""
        self._restore_rows(state)
        train = self.inputs.prompts.train
        if self.recipe.algorithm.filter_range is not None:
            self.dynamic_sampling.restore(state.get("refill", []), train)
        if groups := state.get("in_flight"):
            self.groups.restore(groups, train)
        if ahead := state.get("ahead"):  # of an older version
            self.groups.restore_ahead(ahead, self.steps_done + 1, self.cursor, train)
        self.done = StepsDone(self.cursor.state(), self.dynamic_sampling.state(), self.groups.in_flight)
        self.groups.stale_cost = StaleCost(**state.get("stale_cost", {}))
        try:
            self.autoscaler.restore(state["autoscaler"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"--resume: the checkpoint's planner state is of another version of this program ({error}); start a new run under another "
                "run.name"
            ) from None
        self.learn_stage.restore(state.get("learning", {}))
        self.rollout_stage.restore(state.get("moves", {}))
        if self.rollout_stage.drafts is not None:
            self.rollout_stage.drafts.restore(state.get("drafts", {}))
        if self.stages.prefix is not None:
            self.stages.prefix.speed.restore(state.get("prefix", {}))
        self.worker_group.skipped_in_a_row = state["skipped_in_a_row"]
        self.owes_evaluation = state.get("owes_evaluation", self.steps_done == 0)
        if not self.owes_evaluation:  # a stop before the next step must not rewrite the checkpoint, which would lose its metric
            self.saved = self.steps_done
        self.best.value = state.get("best_value")

    def _save(
        self,
        deadline_s: float | None = None,
        *,
        metric: tuple[str, float] | None = None,
        best: bool = False,
        export: bool = False,
        learned: bool = True,
    ) -> None:
        """Save a checkpoint.

        `metric`: (name, value) of this step's evaluation. `best`: whether it is the best so far. `export`: write a model folder if the
        recipe asks for it. `learned`: False if the learner still has the weights of `policy.path`, so that no state is saved.
        """
        self.record.catch_up()  # a resumed run needs all rows of the ledger

        def learner(folder: Path) -> dict[str, str]:
            if not learned:
                return {}
            large = {**self.learn_stage.files(), **self.rollout_stage.files()}
            return self.learn_stage.worker_groups.save(folder, deadline_s) | writer(large)(folder)

        state = self._driver_state()
        model = trained_policy(self.recipe, self.folder, self.inputs.files, self.worker_group) if self.checkpoints.exports else None
        self.checkpoints.save(self.steps_done, learner, state, metric, model if export else None)
        if best and metric is not None:
            self.checkpoints.save_best(self.steps_done, learner, state, metric, model)
        if self.recipe.checkpoint.resumable and learned:
            self.learn_stage.worker_groups.saved(lambda: self.checkpoints.load()[1])
        self.saved = self.steps_done
        self.record.checkpointed()
