"""The files for clusters of others: what can be checked without such a cluster."""

from __future__ import annotations

import re
import subprocess

import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "recipes" / "cluster"


def test_the_slurm_script_is_bash_and_wants_a_recipe() -> None:
    script = FOLDER / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


def test_the_ray_job_trains_a_recipe_that_is_there_in_a_folder_that_stays() -> None:
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    recipe, root = re.search(r"train (\S+) run.root=(\S+)", job["spec"]["entrypoint"]).groups()  # type: ignore[union-attr]
    assert (ROOT / recipe).exists()
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert any(root.startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_the_image_copies_what_there_is() -> None:
    copied = [line.split()[1:-1] for line in (FOLDER / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    assert copied and all((ROOT / name).exists() for names in copied for name in names)
