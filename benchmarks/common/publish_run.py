"""Train a recipe and write down the bytes of each weight version: `python publish_run.py RECIPE FILE`.

It uses nothing of this folder, because older checkouts run it too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ray.experimental.locations import get_local_object_locations

from rlhfless_ray import Recipe, Runtime


def size(ref: Any) -> int:
    return get_local_object_locations([ref])[ref]["object_size"]


class Sized(Runtime):
    sizes: dict[int, int]
    told: Path

    def publish(self, version: int) -> Any:
        weights = super().publish(version)
        shards = [weights.ref] if hasattr(weights, "ref") else weights.shards
        self.sizes = {**getattr(self, "sizes", {}), version: sum(size(ref) for ref in shards)}
        self.told.write_text(json.dumps(self.sizes))
        return weights


def main() -> None:
    Sized.told = Path(sys.argv[2])
    with Sized(Recipe.load(sys.argv[1])) as run:
        for _ in run:
            pass


if __name__ == "__main__":
    main()
