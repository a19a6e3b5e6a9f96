"""Log to Weights & Biases, online or into an offline folder inside the run folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rlhfless_ray.report.openrlhf_names import Shown

COLUMNS: list[str | int] = ["global_step", "text", "reward"]
MAX_SAMPLES = 200  # rows of the table, which is rewritten at every step: without a limit its cost is quadratic in the steps


class WandbRun:
    """A Weights & Biases run of this process.

    Processes of a resumed run share the group. They plot over `step`, or with OpenRLHF's names over `train/global_step` and
    `eval/global_step`.

    Args:
        folder: the run folder. Files go to its `wandb/`.
        recipe: becomes the config.
        mode: `auto` is online if WANDB_API_KEY is set, else offline.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: Literal["auto", "online", "offline", "off"],
        project: str,
        name: str,
        entity: str | None = None,
        group: str = "",
        openrlhf_names: bool = False,
        recipe: dict[str, Any] | None,
        say: Callable[[str], None],
    ) -> None:
        import wandb

        if mode == "auto":
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        settings = wandb.Settings(
            silent=True,
            console="off",  # do not capture the terminal's output
            disable_git=True,
            disable_code=True,
            init_timeout=60,
            finish_timeout=60,
        )
        run = wandb.init(
            project=project,
            name=name or None,
            group=group or name or None,
            entity=entity,
            dir=str(folder),
            mode="online" if mode == "online" else "offline",
            config=recipe,
            settings=settings,
        )
        # Steps of a resumed run start again from a checkpoint; wandb's own counter would refuse to go back.
        run.define_metric("*", step_metric="step")
        for section in ("train", "eval") if openrlhf_names else ():
            run.define_metric(f"{section}/*", step_metric=f"{section}/global_step")
        self._run, self._wandb = run, wandb
        self._samples: list[tuple[Any, ...]] = []  # the newest
        if mode == "offline":
            say(f"Weights & Biases is offline: `wandb sync {Path(run.dir).parent}` uploads the run")
        elif getattr(run, "url", None):
            say(f"Weights & Biases: {run.url}")

    def write(self, row: dict[str, Any]) -> None:
        logged: dict[str, Any] = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        for key, shown in row.items():
            if isinstance(shown, Shown):
                self._samples.append((row["step"], *shown))
                del self._samples[:-MAX_SAMPLES]
                logged[key] = self._wandb.Table(columns=COLUMNS, data=self._samples)  # a table is logged only once
        self._run.log(logged)

    def close(self) -> None:
        self._run.finish()
