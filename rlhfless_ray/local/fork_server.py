"""Fork a private Ray's workers from one process that has imported torch, DeepSpeed and, for engines, vLLM.

Importing vLLM takes 5.2 CPU seconds, most of what starting an engine costs. A forked worker has it done, and shares the memory of what was
imported. The server imports everything in one thread. Ray starts workers through `worker_prefix`: a small program (`fork_client.py`) hands
its arguments, environment and standard streams to the server, and ends with the forked worker. If it is killed, the worker is, too. Further
members of an actor are forked in the same way, see `local_ray.forked`.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from rlhfless_ray.common.errors import one_line_with_type
from rlhfless_ray.local.fork_client import FAILED, STREAMS, read_request
from rlhfless_ray.local.local_ray import FORK_CLIENT

MAX_REASON_CHARS = 300  # of the sentence that says why a server could not start
END_S = 5.0  # for a server to end, which has little to do but may still import
# What workers of Ray 2.60 import beside Ray itself if it is installed, 0.1 CPU seconds in each
IMPORTED_BY_RAY = (
    "google.protobuf.json_format",
    "google.protobuf.timestamp_pb2",
    "jsonschema",
    "pdb",
    "pydantic.v1",
    "tracemalloc",
    "wcwidth",
)
# What Ray Train's processes and the ranks import, 0.5 CPU seconds and 50 MB in each
OF_RAY_TRAIN = (
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pydoc",
    "requests",
    "rlhfless_ray.recipe.supervised_sections",
    "rlhfless_ray.supervise.supervised_rank",
)
AT_LOADING = "GLIBC_TUNABLES"  # a variable that counts when a program is loaded, so not in a forked process


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
        self.is_closed = False
        self.watch = threading.Thread(target=self._watch, name="fork server watch", daemon=True)
        self.watch.start()

    def _watch(self) -> None:
        """Say so if the server ends before it is closed: workers then start as slowly as without it."""
        code = self.process.wait()
        if code and not self.is_closed:
            failed = Path(self.address + FAILED)
            why = failed.read_text() if failed.exists() else f"it ended with exit code {code}"
            print(f"note: workers cannot be forked, so each imports everything itself: {why}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the server and the workers that are left."""
        self.is_closed = True
        try:
            self.process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def server_command(address: str, architectures: Sequence[str], more: Sequence[str] = (), engines: bool = True) -> list[str]:
    """Return the command of a server, which ends with its standard input. It imports from where this process does.

    `more`: modules that it imports beside those that every run needs. `engines`: see `ForkServer`.
    """
    call = f"serve({address!r}, {[*architectures]!r}, {[*more]!r}, {engines!r})"
    lines = ("import sys", f"sys.path[:] = {sys.path!r}", f"from {__name__} import serve", call)
    return [sys.executable, "-c", "\n".join(lines)]


def server_environment() -> dict[str, str]:
    """Return the environment of a server: with one thread, because a process with several must not fork."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pandas imports Arrow, whose allocator starts one


def worker_prefix(address: str) -> str:
    """Return the beginning of the command of Ray's workers, for `WORKER_PREFIX`."""
    return subprocess.list2cmdline([sys.executable, "-I", "-S", FORK_CLIENT, address])


def serve(address: str, architectures: Sequence[str], more: Sequence[str], engines: bool) -> None:
    """Fork a worker for each connection until standard input ends. Then its workers end."""
    try:
        _import_everything(architectures, more, engines)
    except BaseException as error:
        Path(address + FAILED).write_text(one_line_with_type(error, MAX_REASON_CHARS))
        raise
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    watched = selectors.DefaultSelector()
    watched.register(listening, selectors.EVENT_READ)
    watched.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is sys.stdin:
                for other in watched.get_map().values():
                    if other.data is not None:
                        with suppress(ProcessLookupError):
                            os.kill(other.data[2], signal.SIGKILL)
                return
            if key.fileobj is listening:
                _fork(listening, watched)
            elif (now := watched.get_map().get(key.fd)) is not None and now.data is key.data:
                _end(key, watched)  # otherwise its other event, of the same round, has ended it, and its number may be another's by now


def _import_everything(architectures: Sequence[str], more: Sequence[str], engines: bool) -> None:
    from rlhfless_ray.local.fast_imports import fast_imports

    with fast_imports(["ray"]):  # reads its settings from the environment when it is imported
        if engines:
            from rlhfless_ray.rollout.prepare_vllm import prepare

            prepare(True, architectures)
            import rlhfless_ray.prefix.connector
            import rlhfless_ray.rollout.engine_actor
            import rlhfless_ray.rollout.vllm_engine
        import deepspeed  # noqa: F401
        import peft  # noqa: F401
        import transformers

        for module in (*IMPORTED_BY_RAY, *more):
            with suppress(ImportError):
                import_module(module)
        for name in architectures:
            getattr(transformers, name, None)  # the learner's class, which transformers imports when it is named
        import rlhfless_ray.learn.critic_rank
        import rlhfless_ray.learn.learner_rank
        import rlhfless_ray.learn.rank_actors
        import rlhfless_ray.learn.reference_rank
        import rlhfless_ray.recipe  # noqa: F401
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's: a forked process would first take all operators apart, 35 ms
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"a process must not fork that has {threads} threads")


def _fork(listening: socket.socket, watched: selectors.BaseSelector) -> None:
    """Fork a worker for the next connection, and watch both. None for a client that is gone, or if the fork fails."""
    client, _ = listening.accept()
    streams: list[int] = []
    try:
        head, streams, *_ = socket.recv_fds(client, 4, len(STREAMS))
        with client.makefile("rb") as received:
            wanted = received.read(size := int.from_bytes(head, "big"))
        if len(wanted) < size:
            raise ValueError("the client has ended")
        command, environment, folder = read_request(wanted)
        process = os.fork()
    except (OSError, ValueError):
        client.close()
        for stream in streams:
            os.close(stream)
        return
    if process == 0:
        for inherited in (watched, listening, client):
            inherited.close()
        _become_worker(command, environment, folder, streams)
    for stream in streams:
        os.close(stream)
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


def _become_worker(command: list[str], environment: dict[str, str], folder: str, streams: list[int]) -> NoReturn:
    """Do what a command of Python does, in a forked process, and exit: `python setup_worker.py …`, `python -m …` or `python FILE …`."""
    import atexit
    import runpy
    import tempfile
    import traceback

    import numpy as np

    code = 1
    try:
        os.setpgid(0, 0)  # Ray ends the process group of a worker that has ended
        for number, stream in zip(STREAMS, streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        loaded_with = os.environ.get(AT_LOADING)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # read TMPDIR again
        np.random.seed()
        from ray._private.workers import setup_worker

        if command[1] == setup_worker.__file__:
            sys.argv = _enter_runtime_env(command[2:])
        elif os.environ.get(AT_LOADING) == loaded_with:
            sys.argv = command[1:]
        else:
            os.execv(command[0], command)
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(sys.argv[0]))
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


def _enter_runtime_env(arguments: list[str]) -> list[str]:
    """Do what Ray's `setup_worker.py` does with its arguments: enter the worker's runtime environment. Returns the worker's command.

    An environment that a forked process cannot enter starts another program in its place.
    """
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker
    from ray.core.generated.common_pb2 import Language  # type: ignore[attr-defined]

    known, command = setup_worker.parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    if context.command_prefix or context.py_executable != sys.executable or AT_LOADING in context.env_vars:
        context.exec_worker(command, Language.Value(known.language))
    os.environ.update(context.env_vars)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return command
