"""Decide which runs of a sweep end early, with Ray Tune's scheduler for asynchronous successive halving (ASHA)."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.report.formatting import finite
from rlhfless_ray.sweep.sweep_file import EarlyStopping

NO_CONTROLLER: Any = None  # the methods used here need neither Tune's controller nor its trials


class Halving:
    """Compare runs at steps `first_step`, `first_step` / keep, `first_step` / keep², …

    A run ends if it is not in the best share `keep` of the runs that reached the step before it. So the first run to arrive always
    continues.
    """

    def __init__(self, section: EarlyStopping, metric: str, direction: str, runs: Iterable[str], most_steps: int) -> None:
        from ray.tune.schedulers.async_hyperband import AsyncHyperBandScheduler

        self.metric = metric
        self.scheduler = AsyncHyperBandScheduler(
            time_attr="step",
            metric=metric,
            mode=direction,
            grace_period=section.first_step,
            max_t=most_steps,
            reduction_factor=1 / section.keep,
            stop_last_trials=False,  # a run that reaches its last step ends by itself
        )
        self.trials: JsonObject = {name: SimpleNamespace(trial_id=name) for name in runs}
        for trial in self.trials.values():
            self.scheduler.on_trial_add(NO_CONTROLLER, trial)

    def ends(self, run: str, row: JsonObject) -> bool:
        """Return whether the run ends early at this row of its metrics. Rows without the metric never end a run."""
        if finite(row.get(self.metric)) is None:
            return False
        return bool(self.scheduler.on_trial_result(NO_CONTROLLER, self.trials[run], row) == "STOP")
