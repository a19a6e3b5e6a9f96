"""Start the process that outlives a driver and its Ray, see `watcher_process`, and tell it what to watch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlhfless_ray.local import watcher_process
from rlhfless_ray.local.isolated_call import environment_with_packages
from rlhfless_ray.local.laptop.local_ray import STAND_IN

EXIT_CODE = 1  # of a driver whose Ray died: a failed run
LOST_S = 10.0  # how long a cluster's GCS may be out of reach; Ray's own limit is 60 s
LOST_RESTARTS_S = 60.0  # where the GCS keeps its state in Redis, so that it may come back
RESTARTS = "RAY_REDIS_ADDRESS"  # Ray's variable in such a cluster


class Watcher:
    def __init__(self, temporary: Path | None = None) -> None:
        """`temporary`: folder of a private Ray, which is removed if this process ends without `close`."""
        command = [sys.executable, "-I", "-S", watcher_process.__file__, str(os.getpid())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_with_packages(), start_new_session=True
        )
        self.tells = threading.Lock()
        self.leave_status: Callable[[], None] = lambda: None
        if temporary is not None:
            self.tell(temporary=str(temporary))
        threading.Thread(target=self._wait_for_end, name="end with Ray", daemon=True).start()

    def tell(self, **about: object) -> None:
        assert self.process.stdin is not None
        with self.tells, suppress(BrokenPipeError):  # somebody has killed the watcher: the run goes on without it
            self.process.stdin.write(json.dumps(about).encode() + b"\n")
            self.process.stdin.flush()

    def add_session(self, session: int) -> None:
        """Add a session whose processes are to end with this one."""
        self.tell(sessions=[session])

    def watch_ray(self, *, private: bool) -> None:
        """End the run if one of the processes of Ray dies that this process cannot work without."""
        from ray._private import worker

        node = worker._global_node
        if node is None:
            return
        lost_s = LOST_RESTARTS_S if RESTARTS in os.environ else LOST_S
        found = ray_processes(node.raylet_socket_name, node.session_name)
        self.tell(ray=found, address="" if private else node.gcs_address, lost_s=lost_s)

    def leave_ray(self) -> None:
        """Let Ray end without a word."""
        self.tell(ray={}, address="", lost_s=0.0)

    @contextmanager
    def writes_last_words(self, folder: Path, leave_status: Callable[[], None]) -> Iterator[None]:
        """Have the last words of a run written if it does not leave the block. `leave_status`: called when they begin."""
        self.leave_status = leave_status
        absolute = str(folder.absolute())
        words = [sys.executable, "-m", "rlhfless_ray.runtime.last_words", absolute, str(folder)]
        self.tell(folder=absolute, words=words)
        try:
            yield
        finally:
            self.tell(folder="", words=[])

    def close(self) -> None:
        """End the watcher: everything has been cleaned up."""
        self.process.kill()
        self.process.wait()

    def _wait_for_end(self) -> None:
        """End this process when the watcher says so: no wait on a dead Ray is sure to return."""
        assert self.process.stdout is not None
        if self.process.stdout.readline() == b"died\n":
            self.leave_status()
        if self.process.stdout.readline() == b"end\n":
            with suppress(OSError, ValueError):
                print(end="\033[?25h" if sys.stdout.isatty() else "", flush=True)  # the progress has hidden the cursor
            os._exit(EXIT_CODE)


def ray_processes(raylet_socket: str, session: str) -> dict[int, str]:
    """Return {process id: name} of Ray's own processes on this machine that a driver depends on, agents first."""
    raylets, others = dict[int, str](), dict[int, str]()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        name = os.path.basename(words[0])
        if name == "raylet" and f"--raylet_socket_name={raylet_socket}" in words:
            raylets[process.pid] = f"raylet (process {process.pid})"
        elif name == "gcs_server" and f"--session-name={session}" in words:
            others[process.pid] = f"GCS (process {process.pid})"
    agents = dict[int, str]()
    for raylet in raylets:
        with suppress(psutil.Error):
            for child in psutil.Process(raylet).children():
                if name := agent_name(child.cmdline()):
                    agents[child.pid] = f"{name} (process {child.pid})"
    return {**agents, **raylets, **others}


def agent_name(command: list[str]) -> str:
    """Return which agent of a node a command is, "" for another process."""
    if STAND_IN in command:
        has_address = len(command) > command.index(STAND_IN) + 3  # see `local_ray._replaced`
        return "agent of runtime environments" if has_address else "dashboard agent"
    title = " ".join(command[:3])
    if "RuntimeEnvAgent" in title or "runtime_env/agent/main.py" in title:
        return "agent of runtime environments"
    return "dashboard agent" if "DashboardAgent" in title or "dashboard/agent.py" in title else ""
