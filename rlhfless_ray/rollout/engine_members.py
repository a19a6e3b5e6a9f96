"""Start the further members of an engine from the engine's process, call them and send them weights.

This module does not import vLLM, so that all members can import it at the same time.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

LOST_RC = 70  # exit status of an engine that has lost a member
STEP_CALLS = ("execute_model", "sample_tokens")

started: list[Member] = []  # ahead of the engine, whose executor vLLM itself creates


class Member:
    """A further member's process, and the connection to it."""

    def __init__(self, on_cpu: bool, architectures: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhfless_ray.rollout.engine_member", str(theirs.fileno()), str(int(on_cpu)), *architectures],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()
        self.reader, self.writer = ours.makefile("rb"), ours.makefile("wb")
        threading.Thread(target=self._exit_when_lost, daemon=True).start()

    def _exit_when_lost(self) -> None:
        """End this process with the member: a collective operation that waits for a lost member may wait forever."""
        status = self.process.wait()
        print(f"member {self.process.pid} of this engine ended with status {status}", file=sys.stderr, flush=True)
        os._exit(LOST_RC)

    def call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        cloudpickle.dump((method, args, kwargs or {}), self.writer)
        self.writer.flush()

    def result(self) -> Any:
        """Return the result of the last call, or raise its exception."""
        result = pickle.load(self.reader)
        if isinstance(result, Exception):
            raise result
        return result

    def send_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Send tensors one by one, so that no process holds a second copy of all."""
        pickle.dump([(name, array.dtype, array.shape) for name, array in weights.items()], self.writer)
        for array in weights.values():
            self.writer.write(bytes_of(np.ascontiguousarray(array)))
        self.writer.flush()


def start_members(count: int, on_cpu: bool, architectures: Sequence[str] = ()) -> None:
    """Start the processes of further members up to `count`. They end with this process. `architectures`: as in `prepare`."""
    started.extend(Member(on_cpu, architectures) for _ in range(count - len(started)))


def members_memory_mb() -> float:
    """Return the proportional set size of the further members in MB."""
    import psutil

    return sum(psutil.Process(member.process.pid).memory_full_info().pss for member in started) / 2**20


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
