"""A supervised stage on slots of the pool that the runs of a cluster share."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import ray

from placement.market import Bid
from rlhfless_ray.functions.ledger import read_ledger
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.pool_messages import RunInfo, SlotRequest
from tests.conftest import command_here
from tests.supervise.test_supervised_run import finish, recipe, rows, start, wait_for_steps, weights

pytestmark = [pytest.mark.ray, pytest.mark.learner]


WORK = {
    "data": {"task": "chain", "rows": 960, "batch_rows": 8},
    "evaluate": {"rows": 8},
    "checkpoint": {"every_steps": 0},  # ranks that are stopped save one
}
COMMANDS = {"cpu": ("rlhfless_ray", "train"), "gpu": ("tests.supervise.logical_gpus",)}


def stage(folder: Path, name: str, slot: str, ranks: int) -> Path:
    """Write the recipe of a stage of up to so many ranks, on the cluster that this process is connected to."""
    run = {"root": str(folder / "runs"), "seed": 3, "steps": 120, "name": name, "min_ranks": 1}
    on_cluster = {"cluster": {"address": ray.get_runtime_context().gcs_address}, "functions": {"slot": slot}}
    return recipe(folder, name, run=run, learner={"ranks": ranks, "learning_rate": 1e-3}, **WORK, **on_cluster)


@pytest.fixture(scope="module")
def alone(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What one rank learns without other runs. Two learn the same but for rounding."""
    folder = tmp_path_factory.mktemp("alone")
    finish(start(stage(folder, "alone", "cpu", 1), forks=True))
    return weights(folder / "runs" / "alone")


@pytest.mark.parametrize("slot", ["cpu", pytest.param("gpu", marks=pytest.mark.long)])
def test_a_stage_gives_a_rank_to_a_run_that_waits_and_learns_the_same(ray_cluster, slot, alone, tmp_path: Path, monkeypatch) -> None:
    other = PoolClient(slot, RunInfo("other", share=0.75, least=0))
    try:
        other.bid(Bid("other", (0, 2), (0.0, 1.0)))
        held = [SlotRequest(f"held-{n}") for n in range(2)]
        other.ask(held)
        grants = [slot for one in held for slot in other.wait(one, time.monotonic() + 60)]
        assert len(grants) == 2
        process = start(stage(tmp_path, "shares", slot, 2), command=COMMANDS[slot], forks=True)
        folder = tmp_path / "runs" / "shares"
        wait_for_steps(folder, process, 3)
        assert other.view.others == {"shares": 2}
        other.bid(Bid("other", (0, 3), (0.0, 1e9)))
        more = SlotRequest("more")
        other.ask([more])
        assert other.wait(more, time.monotonic() + 60)
        said = finish(process)
        end_s = time.monotonic() + 10
        while other.view.others and time.monotonic() < end_s:  # it hears of others once a second
            time.sleep(0.1)
        assert other.view.others == {}
        monkeypatch.setattr("rlhfless_ray.local.cluster.connect", lambda address, key: None)  # this process is connected
        address = ray.get_runtime_context().gcs_address
        found = json.loads(command_here("cluster", "--address", address, "--json").stdout)[0]
    finally:
        other.close()
    assert "another run waits for its slots: training goes on with 1 of 2 ranks" in said
    (paid,) = [one["slot_s"] for one in found["past"] if one["name"] == "shares"]
    ledger = read_ledger(folder / "ledger.csv")
    assert paid == pytest.approx(sum(row.seconds * row.slots for row in ledger), rel=0.02)
    assert {row.device for row in ledger}.isdisjoint({str(grant.device) for grant in grants})
    assert [row["step"] for row in rows(folder)] == list(range(121))
    shares = weights(folder)
    assert all(abs(alone[name] - shares[name]).max() < 1e-4 for name in alone)
