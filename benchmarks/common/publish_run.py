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


def main() -> None:
    sizes = dict[int, int]()
    with Runtime(Recipe.load(sys.argv[1])) as run:
        for _ in run:
            weights: Any = run.parts.session.weights if hasattr(run, "parts") else run.weights
            shards = [weights.ref] if hasattr(weights, "ref") else weights.shards
            sizes[weights.version] = sum(map(size, shards))
            Path(sys.argv[2]).write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()
