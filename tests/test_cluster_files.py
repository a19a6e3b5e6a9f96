"""The files for clusters of others: what can be checked without such a cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlhfless_ray.recipe import Recipe
from tests.conftest import ROOT

FOLDER = ROOT / "recipes" / "cluster"


def test_the_slurm_script_is_bash_and_wants_a_recipe() -> None:
    script = FOLDER / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


JOBS = pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("rayjob*.yaml")))


def job_and_schema(name: str = "rayjob") -> tuple[dict[str, Any], jsonschema.Draft202012Validator]:
    schema = yaml.safe_load(Path(__file__).with_name("rayjob_schema.yaml").read_text())
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), jsonschema.Draft202012Validator(schema)


@JOBS
def test_the_ray_job_has_only_fields_that_kuberay_and_kubernetes_know(name: str) -> None:
    job, schema = job_and_schema(name)
    schema.check_schema(schema.schema)
    assert [error.message for error in schema.iter_errors(job)] == []
    cluster = job["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in workers)
    assert job["spec"]["shutdownAfterJobFinishes"]  # without it KubeRay refuses ttlSecondsAfterFinished


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec, pod: spec.update(ttlSecondsAfterFinish=600),
        lambda spec, pod: spec["rayClusterSpec"].update(workerGroupSpec=[]),
        lambda spec, pod: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),  # KubeRay wants text
        lambda spec, pod: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("maxReplicas"),
        lambda spec, pod: pod.update(terminationGracePeriod=60),
        lambda spec, pod: pod["containers"][0].update(workdir="/app"),
        lambda spec, pod: pod["containers"][0]["resources"]["limits"].update(memory="16 GB"),
        lambda spec, pod: pod["volumes"][0]["persistentVolumeClaim"].pop("claimName"),
    ],
)
def test_a_field_of_the_ray_job_that_is_wrong_is_found(spoil: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    job, schema = job_and_schema()
    spoil(job["spec"], job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"])
    assert len([*schema.iter_errors(job)]) == 1


def test_groups_of_workers_are_the_pools_of_the_recipe_and_spot_pods_reach_spot_nodes() -> None:
    job, _ = job_and_schema("rayjob_pools")
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    labels = {name: dict([group["rayStartParams"]["labels"].split("=")]) for name, group in groups.items()}
    (pool,) = Recipe.load(ROOT / re.search(r"train (\S+)", job["spec"]["entrypoint"])[1]).rollout.pools  # type: ignore[index]
    assert pool.labels == labels["spot"] != labels["on-demand"]
    pod = groups["spot"]["template"]["spec"]
    ((key, value),) = pod["nodeSelector"].items()
    assert [(one["key"], one["value"]) for one in pod["tolerations"]] == [(key, value)]
    assert pod["terminationGracePeriodSeconds"] == pool.notice_s and groups["spot"]["minReplicas"] == 0


@JOBS
def test_the_ray_job_trains_a_recipe_that_is_there_in_a_folder_that_stays(name: str) -> None:
    job, _ = job_and_schema(name)
    recipe, root = re.search(r"train (\S+) run.root=(\S+)", job["spec"]["entrypoint"]).groups()  # type: ignore[union-attr]
    assert (ROOT / recipe).exists()
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert any(root.startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_the_image_copies_what_there_is() -> None:
    copied = [line.split()[1:-1] for line in (FOLDER / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    assert copied and all((ROOT / name).exists() for names in copied for name in names)


def test_ray_starts_in_the_image_as_kuberay_starts_it() -> None:
    """Its probes call wget, and before 1.4 its shells are login shells, where /etc/profile resets PATH."""
    _, *stages = re.split("^FROM ", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert len(stages) == 2
    for stage in stages:
        assert " wget " in next(line for line in stage.splitlines() if line.startswith("RUN apt-get"))
        assert "/etc/profile.d/" in stage


def test_the_slurm_script_starts_a_ray_node_on_every_machine_and_passes_the_signal_on(tmp_path: Path) -> None:
    """With stand-ins for the commands of Slurm and Ray, each of which writes down how it was called."""
    both = f'for _ in $(seq 200); do [ "$(grep -c "^ray start" {tmp_path}/log)" = 2 ] && break; sleep 0.1; done'  # nodes start beside it
    trained = f'sleep 60 & trap "kill $!; exit 143" TERM; {both}; echo ready; wait'
    bodies = {
        "scontrol": "echo one; echo two",
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "hostname": "echo fe80::1%eth0 10.0.0.7 10.1.0.7",
        "ray": ":",
        "python": f"if [ $1 = -c ]; then echo 2; else {trained}; fi",
    }
    for name, body in bodies.items():
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/log\n{body}\n')
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_NODELIST": "x"}
    with subprocess.Popen(["bash", FOLDER / "slurm.sh", "r.yaml", "a.b=1"], env=given, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        job.terminate()
        assert job.wait(timeout=30) == 143
    log = (tmp_path / "log").read_text().splitlines()
    assert "python -m rlhfless_ray train r.yaml a.b=1 run.sigterm_s=90" in log
    started = {line for line in log if line.startswith("ray ")}
    ends = "--num-cpus=64 --block"
    assert started == {f"ray start --head --node-ip-address=10.0.0.7 --port=6379 {ends}", f"ray start --address=10.0.0.7:6379 {ends}"}
    steps = [line for line in log if line.startswith("srun")]
    assert len(steps) == 3 and all("--cpus-per-task=64" in line for line in steps)
