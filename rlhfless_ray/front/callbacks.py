"""Call objects with the methods of `transformers.TrainerCallback` while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.step.step import Step

if TYPE_CHECKING:
    from transformers import TrainerControl

CALLED = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_train_end")
NEVER_CALLED = (  # they are about parts of a trainer that a run here has not
    *("on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    *("on_predict", "on_prediction_step", "on_save", "on_push_begin"),
)


class Callbacks:
    """The callbacks of one run, which get (args, state, control, **kwargs).

    `args` is the recipe. `state` and `control` are transformers' own: `global_step`, `max_steps` and `log_history` are set, and
    `should_training_stop` ends the run after the step. `on_log` gets the step's metrics as `logs`, `on_evaluate` those of an evaluation as
    `metrics`. Every call gets `folder`, the run folder.
    """

    def __init__(self, callbacks: Sequence[object], recipe: Recipe, folder: Path) -> None:
        """Call `on_train_begin`. Raises UserError for objects without any of the methods, or with one that is never called."""
        self.callbacks = [one() if isinstance(one, type) else one for one in callbacks]
        for one in self.callbacks:
            _check(one)
        if self.callbacks:
            from transformers import TrainerControl, TrainerState

            self.recipe, self.folder = recipe, folder
            self.state, self.control = TrainerState(max_steps=recipe.run.steps), TrainerControl()
            self._call("on_train_begin")

    def stops_after(self, step: Step) -> bool:
        """Tell the callbacks of a finished step, and return whether one of them stops the run."""
        if not self.callbacks:
            return False
        self.state.global_step = step.number
        self.state.log_history.append({"step": step.number, **step.metrics})
        if step.evaluation:
            self._call("on_evaluate", metrics=step.evaluation)
        self._call("on_log", logs=step.metrics)
        self._call("on_step_end", step=step)
        return self.control.should_training_stop

    def end(self) -> None:
        if self.callbacks:
            self._call("on_train_end")

    def _call(self, name: str, **more: object) -> None:
        for one in self.callbacks:
            if (method := getattr(one, name, None)) is not None:
                found: TrainerControl | None = method(self.recipe, self.state, self.control, folder=self.folder, **more)
                self.control = self.control if found is None else found


def _check(callback: object) -> None:
    name = type(callback).__name__
    if not any(hasattr(callback, method) for method in CALLED):
        raise UserError(f"callbacks: {name} has none of the methods {', '.join(CALLED)}")
    for method in NEVER_CALLED:
        own = getattr(type(callback), method, None)
        if own is not None and getattr(own, "__module__", "") != "transformers.trainer_callback":
            raise UserError(f"callbacks: {name}.{method} is never called here; use {', '.join(CALLED)}")
