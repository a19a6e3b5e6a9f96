"""One replayed run as a process of its own: `python -m benchmarks.common.replayed_run RECIPE [KEY=VALUE …]`."""

from __future__ import annotations

import sys

from benchmarks.common.replayed_runtime import ReplayedRuntime
from rlhfless_ray.cli.guarded import guarded
from rlhfless_ray.recipe import Recipe


def train() -> None:
    with ReplayedRuntime(Recipe.load(sys.argv[1], sys.argv[2:])) as run:
        for _ in run:
            pass


if __name__ == "__main__":
    guarded(train)
