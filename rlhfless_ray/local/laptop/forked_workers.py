"""Fork a private Ray's workers from one process that has imported torch, DeepSpeed and, for engines, vLLM.

Importing vLLM takes 5.2 CPU seconds, most of what starting an engine costs. Forked workers inherit the imports and share their memory. Ray
starts workers through `worker_prefix`: a small program (`fork_client.py`) hands its arguments,
environment and standard streams to the server, and ends with the forked worker. If it is killed, the worker is, too. Further
members of an actor are forked in the same way, see `local_ray.forked`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from rlhfless_ray.local.laptop import fork_server
from rlhfless_ray.local.laptop.fork_client import FAILED
from rlhfless_ray.local.laptop.fork_server import OF_RAY_TRAIN
from rlhfless_ray.local.laptop.local_ray import FORK_CLIENT

LOOK_EVERY_S = 5.0  # interval of looking for the failure of a server for workers of Ray
END_S = 5.0  # for a server to end, which has little to do but may still import


class ForkServer:
    """A server that ends with this process, and its workers with it."""

    def __init__(self, folder: Path, architectures: Sequence[str], engines: bool) -> None:
        """`folder`: for its socket and log. `architectures`: of the models, as config.json names them. `engines`: whether workers are
        vLLM engines too, and not only ranks of a supervised stage."""
        self.address = str(folder / "fork")
        with (folder / "fork_server.log").open("wb") as log:
            self.process = subprocess.Popen(
                server_command(self.address, architectures, () if engines else OF_RAY_TRAIN, engines),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(),
                start_new_session=True,
            )
        self.ended = os.pidfd_open(self.process.pid)
        self.is_closed, self.has_told = False, False
        self.watch = threading.Thread(target=self._watch, name="fork server watch", daemon=True)
        self.watch.start()

    def _watch(self) -> None:
        """Say so if the server, or one for workers of Ray, fails before it is closed: workers then start as slowly as without it."""
        failed, end = Path(self.address + FAILED), select.poll()
        end.register(self.ended, select.POLLIN)
        while not end.poll(1000 * LOOK_EVERY_S):
            if failed.exists() and not end.poll(1000 * END_S):  # a server that fails itself leaves the file too, and ends
                self._say_ray_failed()
                break
        code = self.process.wait()
        os.close(self.ended)
        if code and not self.is_closed:
            why = failed.read_text() if failed.exists() and not self.has_told else f"it ended with exit code {code}"
            print(f"note: workers cannot be forked, so each imports everything itself: {why}", file=sys.stderr, flush=True)

    def _say_ray_failed(self) -> None:
        if not self.has_told and (failed := Path(self.address + FAILED)).exists():
            self.has_told = True
            print(f"note: workers are forked without Ray, so each imports it itself: {failed.read_text()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the server and the workers that are left. Say so if a server for workers of Ray has failed since it was last looked for."""
        self.is_closed = True
        try:
            self.process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        if self.process.returncode == 0:
            self._say_ray_failed()


def server_command(address: str, architectures: Sequence[str], more: Sequence[str] = (), engines: bool = True) -> list[str]:
    """Return the command of a server, which ends with its standard input. It imports from where this process does.

    `more`: modules that it imports beside those that every run needs. `engines`: see `ForkServer`.
    """
    call = f"serve({address!r}, {[*architectures]!r}, {[*more]!r}, {engines!r})"
    lines = ("import sys", f"sys.path[:] = {sys.path!r}", f"from {fork_server.__name__} import serve", call)
    return [sys.executable, "-c", "\n".join(lines)]


def server_environment() -> dict[str, str]:
    """Return the environment of a server: with one thread, because a process with several must not fork."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pandas imports Arrow, whose allocator starts one


def worker_prefix(address: str) -> str:
    """Return the beginning of the command of Ray's workers, for `WORKER_PREFIX`."""
    return subprocess.list2cmdline([sys.executable, "-I", "-S", FORK_CLIENT, address])
