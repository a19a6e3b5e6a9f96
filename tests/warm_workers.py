"""One fork server for all processes of pytest, and for their Rays. A run of four steps takes 11 CPU seconds with it instead of 29."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from filelock import FileLock

from rlhfless_ray.local.laptop.fork_server import OF_RAY_TRAIN
from rlhfless_ray.local.laptop.forked_workers import server_command, server_environment, worker_prefix
from rlhfless_ray.local.laptop.local_ray import WORKER_PREFIX

MAX_ADDRESS = 100  # characters; a socket's path has at most 107
# What other processes of the tests import: of rewards, agents, drafters, slot pools, replayed runs, Ray Serve, Ray Train, and of actor
# classes that tests define. 0.1 to 0.3 CPU seconds in each, and 0.5 here. The last one imports Ray, see `fork_server`.
MORE = (
    "benchmarks.common.replay",
    "rlhfless_ray.agent.agent_actor",
    "rlhfless_ray.step.rollout_plan",
    "rlhfless_ray.cli.run_command",
    "rlhfless_ray.functions.pool_state",
    "rlhfless_ray.reward.reward_functions",
    "rlhfless_ray.rollout.drafter_trainer",
    "rlhfless_ray.step.rollout_batch",
    "rlhfless_ray.preflight.memory_fit",
    "rlhfless_ray.run.recorder",
    "tests.conftest",
    "rlhfless_ray.runtime.runtime",
)
OF_PURE_TESTS = (
    "datasets",
    "jupyter_client",
    "nbclient",
    "scipy.optimize",
    "scipy.stats",
    "transformers.models.auto.modeling_auto",
    "transformers.trainer_utils",
)
keep: list[Any] = []


def start(folder: Path, engines: bool = True) -> None:
    """Have a server in `folder`, shared with others that call this. It ends with the last of them. `engines`: whether it imports vLLM,
    or what pure tests import."""
    address = str(folder / "warm")
    if WORKER_PREFIX in os.environ or len(address) > MAX_ADDRESS:
        return
    users = address + "_users"  # a pipe that every user keeps open, and whose end the server reads
    with FileLock(address + ".lock"):
        if Path(users).exists():
            keep.append(os.open(users, os.O_WRONLY))
        else:
            os.mkfifo(users)
            reads = os.open(users, os.O_RDONLY | os.O_NONBLOCK)
            keep.append(os.open(users, os.O_WRONLY))
            more = (*OF_RAY_TRAIN, *MORE, *(() if engines else OF_PURE_TESTS))
            command = server_command(address, ["Qwen2ForCausalLM"], more, engines)
            with Path(address + ".log").open("wb") as log:
                keep.append(
                    subprocess.Popen(command, stdin=reads, stdout=log, stderr=log, env=server_environment(), start_new_session=True)
                )
            os.close(reads)
    os.environ[WORKER_PREFIX] = worker_prefix(address)
