"""Fork Ray's workers from a process that has imported vLLM, torch and DeepSpeed.

Imports are most of what a short run costs: with workers of their own a run of four steps takes 29 CPU seconds, forked it takes 11.
`start` starts a server that imports everything once, in one thread, and forks: one for all processes of pytest. It also sets
`WORKER_PREFIX`, so that the tests' Rays start workers through this file. Run as a program, this file hands its arguments, environment
and outputs to the server, and ends with the forked worker. If it is killed, the worker is, too.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

PREFIX = "RLHFLESS_WORKER_PREFIX"  # see rlhfless_ray/local/local_ray.py
READY_S, POLL_S = 30.0, 0.05  # Ray gives a worker 60 s to register


def start(folder: Path) -> None:
    """Have a server in `folder`, shared with others that call this. It ends with the last of them."""
    address = str(folder / "warm")
    if len(address) > 100:  # the limit of a socket's path is 107
        return
    users = address + "_users"  # a pipe that every user keeps open, and whose end the server reads
    from filelock import FileLock  # `ask` runs without site-packages

    with FileLock(address + ".lock"):
        if Path(users).exists():
            keep.append(os.open(users, os.O_WRONLY))
        else:
            os.mkfifo(users)
            reads = os.open(users, os.O_RDONLY | os.O_NONBLOCK)
            keep.append(os.open(users, os.O_WRONLY))
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
            keep.append(subprocess.Popen([sys.executable, __file__, "serve", address], stdin=reads, env=one_thread))
            os.close(reads)
    os.environ[PREFIX] = subprocess.list2cmdline([sys.executable, "-I", "-S", __file__, "ask", address])


keep: list[Any] = []


def ask(address: str, command: list[str]) -> None:
    """Have a worker forked, wait until it ends and exit as it does. Run the command here if there is no server."""
    server = socket.socket(socket.AF_UNIX)
    for _ in range(int(READY_S / POLL_S)):  # it imports everything first, which every worker would do otherwise
        with suppress(OSError):
            server.connect(address)
            break
        time.sleep(POLL_S)
    else:
        os.execv(command[0], command)
    wanted = json.dumps([command, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(server, [len(wanted).to_bytes(4, "big")], [1, 2])
    server.sendall(wanted)
    sys.exit(int.from_bytes(server.recv(1) or b"\1", "big"))


def serve(address: str) -> None:
    """Fork a worker for each connection until standard input ends."""
    from rlhfless_ray.local.fast_imports import fast_imports

    with fast_imports(["ray"]):  # reads its settings from the environment when it is imported
        from rlhfless_ray.rollout.vllm_engine import prepare

        prepare(True, ["Qwen2ForCausalLM"])
        import deepspeed  # noqa: F401
        import peft  # noqa: F401

        import rlhfless_ray.learn.learner_rank
        import rlhfless_ray.rollout.engine_actor  # noqa: F401
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    watched = selectors.DefaultSelector()
    watched.register(listening, selectors.EVENT_READ)
    watched.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listening:
                _fork(listening, watched)
            elif key.fileobj in watched.get_map():  # its other event, of the same round, may have ended it
                _end(key, watched)


def _fork(listening: socket.socket, watched: selectors.BaseSelector) -> None:
    """Fork a worker for the next connection, and watch both."""
    client, _ = listening.accept()
    size, outputs, *_ = socket.recv_fds(client, 4, 2)
    with client.makefile("rb") as received:
        wanted = json.loads(received.read(int.from_bytes(size, "big")))
    process = os.fork()
    if process == 0:
        for inherited in (watched, listening, client):
            inherited.close()
        _become_worker(*wanted, outputs)
    for output in outputs:
        os.close(output)
    ended = os.pidfd_open(process)
    for event in (client, ended):
        watched.register(event, selectors.EVENT_READ, (client, ended, process))


def _end(key: selectors.SelectorKey, watched: selectors.BaseSelector) -> None:
    """Pass a worker's exit status on to its client, or kill the worker of a client that was killed."""
    client, ended, process = key.data
    if key.fileobj is client:
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    for event in (client, ended):
        watched.unregister(event)
    with suppress(OSError):  # killed
        client.sendall(bytes([status % 256]))
    client.close()
    os.close(ended)


def _become_worker(command: list[str], environment: dict[str, str], folder: str, outputs: list[int]) -> NoReturn:
    """Do what `python setup_worker.py …` does, in a forked process, and exit."""
    import atexit
    import runpy
    import tempfile
    import traceback

    import numpy as np

    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
            os.close(output)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # read TMPDIR again
        np.random.seed()
        from ray._private.runtime_env.context import RuntimeEnvContext
        from ray._private.workers import setup_worker
        from ray.core.generated.common_pb2 import Language

        known, sys.argv = setup_worker.parser.parse_known_args(command[2:])
        context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
        if context.command_prefix or context.py_executable != sys.executable:
            context.exec_worker(sys.argv, Language.Value(known.language))
        os.environ.update(context.env_vars)
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ask(sys.argv[2], sys.argv[3:])
