"""Query memory and GPUs of the machine that this process runs on. Ray tasks query other nodes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from placement.memory import VALUE_BYTES, snapshot_bytes

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

SNAPSHOT_SHARE = 0.25  # of the driver's memory that copies of the learner's state may take by default
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
NVIDIA_SMI_S = 20.0


@cache
def host_memory_bytes() -> int:
    """Return memory and swap that the processes of this machine or container may use together, in bytes. Read once in a process."""
    memory = psutil.virtual_memory().total
    for path in CGROUP_LIMITS:
        try:
            memory = min(memory, int(Path(path).read_text()))
        except (OSError, ValueError):  # missing file, or the word `max`
            continue
    return memory + psutil.swap_memory().total


def gpu_memory_bytes() -> int | None:
    """Return the memory of this machine's largest NVIDIA GPU in bytes, or None if nvidia-smi does not say."""
    try:
        output = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
        return max(int(line) for line in output.split("\n") if line.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def snapshot_every_steps(recipe: Recipe, parameters: int) -> int:
    """Return the steps between two copies of the learner's state in memory, decided by this machine's memory if the recipe does not.

    `parameters`: of the policy. Adapters, where only these are trained, are too small to matter.
    """
    every_steps = recipe.checkpoint.memory_every_steps
    if every_steps is not None:
        return every_steps
    state = 0 if recipe.lora.rank else snapshot_bytes(parameters, VALUE_BYTES[recipe.policy.dtype])
    # two, because the older one stays until the newer one is complete
    return 1 if 2 * state <= SNAPSHOT_SHARE * recipe.cluster.memory_share * host_memory_bytes() else 0


def memory_bytes(gpu: bool) -> int | None:
    """Return the memory of a slot in bytes: of the largest GPU, or of the whole machine if slots are CPU cores."""
    return gpu_memory_bytes() if gpu else host_memory_bytes()


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))
    return gpus
