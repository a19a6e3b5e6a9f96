"""Run a supervised stage whose slots are logical GPUs and whose ranks compute on cores: `python -m tests.supervise.logical_gpus RECIPE`."""

from __future__ import annotations

import sys
from dataclasses import replace

from rlhfless_ray.cli.guarded import guarded
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.run_supervised import SupervisedStage
from rlhfless_ray.supervise.trained_ranks import TrainedRanks


class OnCores(TrainedRanks):
    def _run_once(self, nodes: list[str]) -> bool:
        self.start = replace(self.start, device="cpu")
        return super()._run_once(nodes)


if __name__ == "__main__":
    import rlhfless_ray.supervise.trained_ranks as module

    module.TrainedRanks = OnCores  # type: ignore[misc]
    guarded(lambda: SupervisedStage(SupervisedRecipe.load(sys.argv[1])).run())
