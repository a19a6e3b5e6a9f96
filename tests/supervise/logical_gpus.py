"""Run a supervised stage whose slots are logical GPUs and whose ranks compute on cores: `python -m tests.supervise.logical_gpus RECIPE`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from rlhfless_ray.cli.guarded import guarded
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.run_supervised import SupervisedStage


class LogicalGpuStage(SupervisedStage):
    def _run_ranks(self, start: Any, nodes: Any) -> bool:
        return super()._run_ranks(replace(start, device="cpu"), nodes)


if __name__ == "__main__":
    guarded(lambda: LogicalGpuStage(SupervisedRecipe.load(sys.argv[1])).run())
