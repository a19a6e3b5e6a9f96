"""Ranks that change their layout between updates end where a fixed layout ends, and fetch no more than they lack."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_policy import random_batch, tiny_policy

from rlhfless_ray.learn.rank_settings import RankLayout
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.weights.tensor_file import load_tensors
from tests.learn.conftest import learner_settings

pytestmark = [pytest.mark.learner, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
LAYOUTS = [RankLayout(), RankLayout(1, 2), RankLayout(2), RankLayout(2, 1), RankLayout(2, 2), RankLayout(2, 3), RankLayout(2, 0, 2)]
LAYOUTS += [RankLayout(2, 2, 1, 2)]
UPDATES, SEEDS = 8, (0, 1, 2)


def drawn(seed: int) -> dict[str, Any]:
    """Draw changes of layout, and kills in between."""
    rng = np.random.default_rng(seed)
    changes = {0, *(int(n) for n in rng.choice(np.arange(1, UPDATES), 5, replace=False))}
    kills = {int(n) for n in rng.choice(np.arange(1, UPDATES), 2, replace=False)}
    return {"layouts": {n: LAYOUTS[int(rng.integers(len(LAYOUTS)))] for n in sorted(changes)}, "kills": kills}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("resized")
    rng = np.random.default_rng(7)
    batches = [random_batch(rng) for _ in range(UPDATES)]
    plain, lora = learner_settings(ema={"beta": 0.9}), learner_settings(lora={"rank": 4})
    fixed: dict[str, Any] = {"layouts": {0: RankLayout()}}
    grown = {"layouts": {0: RankLayout(), 2: RankLayout(2, 1), 4: RankLayout(2, 3), 6: RankLayout()}}
    back = {"layouts": {0: RankLayout(), 3: RankLayout(2), 5: RankLayout()}}
    kinds: dict[str, Any] = {"fixed": fixed, "grown": grown, "back": back, **{f"drawn {seed}": drawn(seed) for seed in SEEDS}}
    cases = {name: {"settings": plain, **kind} for name, kind in kinds.items()}
    cases |= {f"lora {name}": {"settings": lora, **kinds[name]} for name in ("fixed", "grown")}
    files = tiny_policy(kv_heads=2)
    (folder / "cases").write_bytes(pickle.dumps({name: {"files": files, "batches": batches, **case} for name, case in cases.items()}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = forked([sys.executable, str(HERE / "resized_ranks.py"), str(folder)])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return pickle.loads((folder / "found").read_bytes())


def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def averages(found: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for content in found["average"].values() for name, tensor in load_tensors(content).items()}


@pytest.mark.parametrize("name", ["grown", "back", *(f"drawn {seed}" for seed in SEEDS)])
def test_changes_of_layout_and_kills_change_weights_only_by_rounding(found: dict[str, Any], name: str) -> None:
    assert farthest(found[name]["weights"], found["fixed"]["weights"]) < 1e-5
    assert averages(found["fixed"]) and farthest(averages(found[name]), averages(found["fixed"])) < 1e-5


def test_adapters_go_on_in_other_layouts(found: dict[str, Any]) -> None:
    assert farthest(found["lora grown"]["weights"], found["lora fixed"]["weights"]) < 1e-5


def test_a_rank_fetches_what_it_lacks_and_no_more(found: dict[str, Any]) -> None:
    weights = sum(x.nbytes for x in found["fixed"]["weights"].values())
    (_, grown, _, _), (_, doubled, single) = found["grown"]["moved"], found["back"]["moved"]
    # a further rank needs all weights, its half of two moments at ZeRO 1, and the average of its layers, which rank 0 had
    assert grown[0] == grown[1] == pytest.approx(2.5 * weights, rel=0.05)
    assert doubled[0] == doubled[1] == pytest.approx(3.5 * weights, rel=0.05)
    assert single[0] == single[1] == pytest.approx(0.5 * weights, rel=0.15), "rank 0 lacks the average of the other's layers only"


def test_every_change_fetches_at_least_the_bound(found: dict[str, Any]) -> None:
    for of_case in found.values():
        assert all(fetched >= least >= 0 for fetched, least in of_case["moved"][1:])
