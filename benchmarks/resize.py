"""Time and bytes of a change of the learner's ranks, 1 → 2 → 1, in processes of one machine.

    python -m benchmarks.resize            # 11 M parameters
    python -m benchmarks.resize --large    # and 494 M, which needs about 30 GB

Ranks that stay keep their processes. The state goes through files in shared memory, where a run uses Ray's object store. `keep` is the copy
of the state that a run makes after each update anyway. Run it on an idle machine: every rank has one thread.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfless_ray.learn.rank_settings import RankLayout, learner_settings
from rlhfless_ray.recipe import Recipe
from tests.learn.resized_ranks import Group
from tests.learn.tiny_policy import random_batch, tiny_policy

SIZES: dict[str, dict[str, int]] = {
    "11 M": {"width": 384, "layers": 8, "vocabulary": 8192},
    "494 M": {"width": 1792, "layers": 24, "vocabulary": 100_000},
}
CHANGES = (RankLayout(2), RankLayout(), RankLayout(2, 1), RankLayout(1, 1), RankLayout(2, 3), RankLayout(1, 3))


def measure(name: str, shape: dict[str, int]) -> None:
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "learner": {"learning_rate": 1e-4}})
    group = Group(learner_settings(recipe), tiny_policy(kv_heads=2, **shape))
    batch: Any = random_batch(np.random.default_rng(0), groups=2)
    before = RankLayout()
    group.build(before, None)
    group.update(batch)
    for layout in CHANGES:
        began_s = time.monotonic()
        state = group.keep()
        kept_s = time.monotonic()
        fetched, least = group.build(layout, state)
        built_s = time.monotonic()
        group.update(batch)
        print(
            f"{name}: {before} → {layout}: {built_s - kept_s:.2f} s (keep {kept_s - began_s:.2f} s), "
            f"{fetched / 2**20:.1f} MB fetched, at least {least / 2**20:.1f} MB"
        )
        before = replace(layout)
    group.end()


def main() -> None:
    import deepspeed  # noqa: F401 - once, and then each rank is forked

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also 494 M parameters")
    chosen = parser.parse_args()
    for name, shape in SIZES.items():
        if chosen.large or name == "11 M":
            measure(name, shape)


if __name__ == "__main__":
    main()
