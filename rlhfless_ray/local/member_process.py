"""Further processes of an actor that hold parts of one model. The actor's process starts and calls them, and they end with it.

This module imports no large library, so that all members can import theirs at the same time.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, BinaryIO

import cloudpickle

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.local.laptop.local_ray import forked

LOST_RC = 70  # exit status of an actor's process that has lost a member
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

running: list[MemberProcess] = []  # of this process


class MemberProcess:
    """A further member's process, and the connection to it."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Start `python -m module arguments…`, whose standard input is the connection. `environment`: added to this process's."""
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            forked([sys.executable, "-m", module, *arguments]),
            stdin=theirs.fileno(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **(environment or {})},
        )
        theirs.close()
        self.reader, self.writer = ours.makefile("rb"), ours.makefile("wb")
        running.append(self)
        threading.Thread(target=self._exit_when_lost, daemon=True).start()

    def _exit_when_lost(self) -> None:
        """End this process with the member: a collective operation that waits for a lost member may wait forever."""
        status = self.process.wait()
        exit_as_lost(f"a member of process {os.getpid()} ended with status {status}")

    @cached_property
    def pid(self) -> int:
        """The member's process id, which is the first that it sends. `process` may only wait for it."""
        return pickle.load(self.reader)

    def call(self, method: object, args: tuple[object, ...] = (), kwargs: JsonObject | None = None) -> None:
        cloudpickle.dump((method, args, kwargs or {}), self.writer)
        self.writer.flush()

    def result(self) -> Any:
        """Return the result of the last call, or raise its exception."""
        assert self.pid
        result = pickle.load(self.reader)
        if isinstance(result, Exception):
            raise result
        return result


def exit_as_lost(why: str) -> None:
    """End this process, so that its pool replaces it. `why`: for its log."""
    print(why, file=sys.stderr, flush=True)
    os._exit(LOST_RC)


def call_after_end(process: int, function: Callable[[], None]) -> None:
    """Call a function in a thread when a process ends, which may be the child of another."""
    file = os.pidfd_open(process)

    def wait() -> None:
        select.select([file], [], [])
        os.close(file)
        function()

    threading.Thread(target=wait, daemon=True).start()


def members_memory_mb() -> float:
    """Return the proportional set size of this process's further members in MB."""
    import psutil

    return sum(psutil.Process(member.pid).memory_full_info().pss for member in running) / 2**20


def connect() -> tuple[BinaryIO, BinaryIO]:
    """Return the reader and writer of a member's connection to the process that started it, whose end it does not outlive."""
    # A stopped process notices no end of its connection. The kernel kills it as well when its parent was killed for being hung.
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    threading.Thread(target=_exit_with_connection, daemon=True).start()
    connection = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    reader, writer = connection.makefile("rb"), connection.makefile("wb")
    pickle.dump(os.getpid(), writer)
    writer.flush()
    return reader, writer


def _exit_with_connection() -> None:
    ends = select.poll()
    ends.register(sys.stdin.fileno(), select.POLLRDHUP)
    ends.poll()
    os._exit(0)
