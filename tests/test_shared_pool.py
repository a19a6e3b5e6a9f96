"""Two runs on one cluster: they share its slots, and pay for them once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks.common.replay_setup import build, recipe_for, synthetic_lengths
from placement.market import Bid
from rlhfless_ray.cli.cluster_command import show
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger, read_ledger
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.pool_messages import OTHER_VERSION, RunInfo
from rlhfless_ray.local.laptop.local_ray import forked
from tests.conftest import ROOT, command_here, environment
from tests.run_files import rows

pytestmark = pytest.mark.ray


def start(
    folder: Path, name: str, address: str, steps: int, learn_s: float = 1.0, actors: int = 4, **sections: Any
) -> subprocess.Popen[str]:
    """Start a replayed run in a folder of its own."""
    folder = folder / name
    folder.mkdir()
    lengths = synthetic_lengths(32, 4, 256, seed=len(name))
    world = build(folder, lengths, base_s=2e-3, per_seq_s=5e-4, start_s=0.2, learn_s=learn_s, clock=2.0)
    cluster = {"address": address, "pool": True, **sections.pop("cluster", {})}
    more = {"run": {"name": name}, "functions": {"slot": "gpu"}, "objective": {"prefer": 0.95}, "cluster": cluster, **sections}
    recipe = recipe_for(world, folder, steps=steps, prompts=16, samples=4, actors=actors, max_tokens=256, **more)
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    command = forked([sys.executable, "-m", "benchmarks.common.replayed_run", str(path)])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment())


def test_two_runs_share_the_slots_of_a_cluster_and_pay_for_them_once(ray_cluster, tmp_path, capsys):
    address = ray.get_runtime_context().gcs_address
    watch = PoolClient("gpu", RunInfo("watch", share=0.0, least=0))  # keeps the pool when the last run has left
    try:
        runs = [start(tmp_path, "short", address, 3), start(tmp_path, "long", address, 5)]
        said = [run.communicate(timeout=300)[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0], said
        cluster = forked([sys.executable, "-m", "rlhfless_ray", "cluster", "--address", address, "--json"])
        found = json.loads(subprocess.check_output(cluster, cwd=ROOT, env=environment(), timeout=300))[0]
    finally:
        watch.close()
    show(found)
    table = capsys.readouterr().out
    assert found["slots"] == 4 and found["held"] == 0
    assert "short" in table and "slots passed from run to run" in table
    paid = {run["name"]: run["slot_s"] for run in found["past"]}
    for name in ("short", "long"):
        folder = tmp_path / name / "runs" / name
        own_s = sum(row.seconds * row.slots for row in read_ledger(folder / "ledger.csv"))
        assert paid[name] == pytest.approx(own_s, abs=1.0)
        last = rows(folder)[-1]
        assert last["shared/runs"] >= 2 and last["shared/paid_slot_s"] > 0 and last["shared/reason"]


def test_a_run_waits_for_its_slot_that_another_run_gives_back(ray_cluster, tmp_path):
    """The other run stands for one whose rollout takes what is free, and gives it back after a moment."""
    address = ray.get_runtime_context().gcs_address
    source = PoolClient("cpu", RunInfo("other", share=0.5, least=0))
    leases = LeaseManager("cpu", Ledger("cpu"), 60.0, "other", source)
    cores = {"functions": {"slot": "cpu"}, "learner": {"overlap": "off", "max_slots_per_rank": 2}}
    run = start(tmp_path, "own", address, 7, learn_s=8.0, actors=1, **cores)
    steps, taken, end_s = tmp_path / "own" / "runs" / "own" / "metrics.jsonl", [], time.monotonic() + 240
    try:
        while run.poll() is None and time.monotonic() < end_s:
            source.bid(Bid("other", (0, 1, 2, 3, 4), (0.0, 10.0, 20.0, 30.0, 40.0)), 0.3)
            known = len(steps.read_text().splitlines()) if steps.exists() else 0
            if surplus := source.view.surplus:
                time.sleep(0.3)
                leases.release([taken.pop() for _ in range(surplus)])
            elif len(taken) < (3 if known >= 4 else 2):  # the run tries both numbers of slots first
                taken += leases.collect(leases.ask(1), "rollout", 0.05)
            time.sleep(0.2)
        said = run.communicate(timeout=60)[0]
    finally:
        leases.release_all()
    assert run.returncode == 0, said
    told = rows(steps.parent)
    waited = [row for row in told if "waits for 1 slot that another run gives back" in row.get("pool/learn_reason", "")]
    assert any(row["pool/learn_slots"] == 2 for row in waited), [row.get("pool/learn_reason") for row in told]
    assert "the update waits for 1 slot" in said


def test_a_run_one_step_off_goes_on_while_another_run_holds_the_slots_beside_its_update(ray_cluster, tmp_path):
    """Its learner holds the only slot that it has. Before, it waited for one more with its update done, and two such runs forever."""
    source = PoolClient("gpu", RunInfo("other", share=0.75, least=0))
    leases = LeaseManager("gpu", Ledger("gpu"), 60.0, "other", source)
    try:
        source.bid(Bid("other", (0, 3), (0.0, 1000.0)))
        leases.take(3, "rollout")
        run = start(tmp_path, "own", ray.get_runtime_context().gcs_address, 3, actors=1, rollout={"max_lag_steps": 1})
        said = run.communicate(timeout=120)[0]
    finally:
        leases.release_all()
        run.kill()
    assert run.returncode == 0, said
    told = rows(tmp_path / "own" / "runs" / "own")
    assert [row["lag/max"] for row in told] == [0, 0, 0], "under the newest weights, after the update"
    assert "step 2: no slot is free beside the update, so its rollout begins after it" in said


def test_a_run_that_the_pool_refuses_says_why_and_leaves_nothing(ray_cluster, tmp_path):
    watch = PoolClient("gpu", RunInfo("watch", share=0.5, least=0))
    try:
        refused = start(tmp_path, "greedy", ray.get_runtime_context().gcs_address, 1, cluster={"share": 0.75})
        said = refused.communicate(timeout=300)[0]
    finally:
        watch.close()
    assert refused.returncode == 2
    assert "error: cluster.share: 0.75 and the shares of other runs (watch: 0.5) add up to 1.25" in said.splitlines()[-1]
    assert not list((tmp_path / "greedy" / "runs").glob("*"))


def test_a_run_of_another_version_than_the_pool_says_so_and_leaves_nothing(ray_cluster, tmp_path):
    watch = PoolClient("gpu", RunInfo("watch", least=0))
    try:
        ray.get(watch.handle.__ray_call__.remote(lambda self: setattr(sys.modules[type(self).__module__], "MESSAGES", 99)))
        refused = start(tmp_path, "newer", ray.get_runtime_context().gcs_address, 1)
        said = refused.communicate(timeout=300)[0]
    finally:
        watch.close()
    assert refused.returncode == 2
    assert said.splitlines()[-1] == f"error: {OTHER_VERSION}; `rlhfless cluster` shows who is on it"
    assert not list((tmp_path / "newer" / "runs").glob("*"))


def test_without_a_pool_there_is_nothing_to_show(ray_cluster, monkeypatch):
    monkeypatch.setattr("rlhfless_ray.local.cluster.connect", lambda address, key: None)  # this process is connected
    done = command_here("cluster", "--address", ray.get_runtime_context().gcs_address)
    assert done.returncode == 0 and "no run shares the slots of this cluster now" in done.stdout
