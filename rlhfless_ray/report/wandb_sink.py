"""Log to Weights & Biases, online or into an offline folder inside the run folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlhfless_ray.common.errors import one_line_with_type
from rlhfless_ray.report.openrlhf_names import Shown
from rlhfless_ray.report.sinks import MAX_ERROR_CHARS, SinkRun, numbers

COLUMNS: list[str | int] = ["global_step", "text", "reward"]
MAX_SAMPLES = 200  # rows of the table, which is rewritten at every step: without a limit its cost is quadratic in the steps


class WandbRun:
    """A Weights & Biases run of this process, whose config is the recipe. Files go to the run folder's `wandb/`.

    Processes of a resumed run share the group. They plot over `step`, or with OpenRLHF's names over `train/global_step` and
    `eval/global_step`.
    """

    def __init__(self, sink_run: SinkRun) -> None:
        import wandb

        watch, say = sink_run.watch, sink_run.say
        online = watch.wandb == "online" or (watch.wandb == "auto" and bool(os.environ.get("WANDB_API_KEY")))
        try:
            run = _start(sink_run, online)
        except Exception as error:  # no login or network: log offline instead
            if watch.wandb != "online":
                raise
            say(f"cannot log to Weights & Biases online ({one_line_with_type(error, MAX_ERROR_CHARS)})")
            online, run = False, _start(sink_run, online=False)
        # Steps of a resumed run start again from a checkpoint; wandb's own counter would refuse to go back.
        run.define_metric("*", step_metric="step")
        for section in ("train", "eval") if watch.metric_names == "openrlhf" else ():
            run.define_metric(f"{section}/*", step_metric=f"{section}/global_step")
        self._run, self._wandb = run, wandb
        self._samples: list[tuple[Any, ...]] = []  # the newest
        if not online:
            say(f"Weights & Biases is offline: `wandb sync {Path(run.dir).parent}` uploads the run")
        elif getattr(run, "url", None):
            say(f"Weights & Biases: {run.url}")

    def write(self, row: dict[str, Any]) -> None:
        logged: dict[str, Any] = {"step": row["step"], **numbers(row)}
        for key, shown in row.items():
            if isinstance(shown, Shown):
                self._samples.append((row["step"], *shown))
                del self._samples[:-MAX_SAMPLES]
                logged[key] = self._wandb.Table(columns=COLUMNS, data=self._samples)  # a table is logged only once
        self._run.log(logged)

    def close(self) -> None:
        self._run.finish()


def _start(run: SinkRun, online: bool) -> Any:
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",  # do not capture the terminal's output
        disable_git=True,
        disable_code=True,
        init_timeout=60,
        finish_timeout=60,
    )
    return wandb.init(
        project=run.watch.wandb_project,
        name=run.name,
        group=run.watch.wandb_group or run.folder.name,
        entity=run.watch.wandb_entity,
        dir=str(run.folder),
        mode="online" if online else "offline",
        config=run.recipe,
        settings=settings,
    )
