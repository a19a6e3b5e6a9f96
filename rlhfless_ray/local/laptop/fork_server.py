"""The server that forks a private Ray's workers, see `forked_workers`. It imports everything in one thread."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TextIO

from rlhfless_ray.common.errors import one_line_with_type
from rlhfless_ray.local.laptop.fork_client import FAILED, STREAMS, read_request
from rlhfless_ray.local.orphans import adopt_orphans, end_below, reap_adopted

MAX_FAILURE_CHARS = 300  # of the sentence that says why a server could not start
REAP_EVERY_S = 10.0  # interval of forgetting adopted processes that have ended
SETUP_WORKER = "ray/_private/workers/setup_worker.py"  # the program of Ray's workers
OF_RAY = ("ray._private.workers.default_worker", "ray.util.placement_group", "ray.util.scheduling_strategies")
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
# What engines and ranks import. By name, because import statements would close a circle of folders
ENGINE_IMPORTS = "rlhfless_ray.engine.prepare_vllm"
OF_ENGINES = ("rlhfless_ray.prefix.connector", "rlhfless_ray.engine.exact_actor", "rlhfless_ray.engine.vllm_engine")
LIBRARIES_OF_RANKS = ("deepspeed", "peft", "transformers")
OF_RANKS = (
    "rlhfless_ray.learn.critic_rank",
    "rlhfless_ray.learn.learner_rank",
    "rlhfless_ray.learn.rank_actors",
    "rlhfless_ray.learn.reference_rank",
    "rlhfless_ray.recipe",
)
AT_LOADING = "GLIBC_TUNABLES"  # a variable that counts when a program is loaded, so not in a forked process


def serve(address: str, architectures: Sequence[str], more: Sequence[str], engines: bool) -> None:
    """Fork a worker for each connection until standard input ends. Then its workers end."""
    try:
        _import_everything(architectures, more, engines)
    except BaseException as error:
        Path(address + FAILED).write_text(one_line_with_type(error, MAX_FAILURE_CHARS))
        raise
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    _Server(listening, more).run_adopting(sys.stdin)


def _import_everything(architectures: Sequence[str], more: Sequence[str], engines: bool) -> None:
    from rlhfless_ray.local.fast_imports import fast_imports

    with fast_imports(["ray"]):  # see `_Server`
        if engines:
            import_module(ENGINE_IMPORTS).prepare(True, architectures)
            for module in OF_ENGINES:
                import_module(module)
        for module in LIBRARIES_OF_RANKS:
            import_module(module)
        _import_those_there((*IMPORTED_BY_RAY, *more))
        for name in architectures:
            getattr(sys.modules["transformers"], name, None)  # the learner's class, which transformers imports when it is named
        for module in OF_RANKS:
            import_module(module)
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's: a forked process would first take all operators apart, 35 ms
    _check_threads()


def _receive(source: socket.socket, count: int) -> tuple[list[int], bytes]:
    """Return the file descriptors, `count` at most, and the content of a message of `_send`. Raises ValueError if it is not complete."""
    head, received, *_ = socket.recv_fds(source, 4, count)
    content = source.recv(size, socket.MSG_WAITALL) if (size := int.from_bytes(head, "big")) else b""
    if len(content) < size or len(received) < count:
        for one in received:
            os.close(one)
        raise ValueError("the client has ended")
    return received, content


@dataclass(frozen=True)
class _RayServer:
    """A server for workers of Ray. It ends with its last worker once `clients` is closed, and kills its workers when `lifeline` is."""

    process: int
    clients: socket.socket
    lifeline: int

    def close(self) -> None:
        self.clients.close()
        os.close(self.lifeline)


class _Server:
    """Forks a process for each client, and passes its exit status on.

    Workers of Ray are forked from a further server for each environment, which has imported Ray. When Ray is imported, it reads settings
    from the environment, and the worker's job is one of them.
    """

    def __init__(self, source: socket.socket, more: Sequence[str], of_ray: bool = False) -> None:
        """`source`: of clients, or in a server `of_ray`, of clients that this server passes on. `more`: see `server_command`."""
        self.source, self.more, self.of_ray = source, more, of_ray
        self.watched = selectors.DefaultSelector()
        self.children: dict[int, tuple[socket.socket, int]] = {}  # client and file descriptor of each process
        self.ray_servers: dict[tuple[tuple[str, str], ...], _RayServer | None] = {}  # by environment; None for one that has ended
        self.is_open = True  # for clients
        self.adopts = False

    def run(self, end: int | TextIO) -> None:
        """Serve clients until `end` can be read from, and kill their processes then."""
        self.watched.register(end, selectors.EVENT_READ, self._kill)
        self.watched.register(self.source, selectors.EVENT_READ, self._take)
        while True:
            if self.adopts:
                reap_adopted({*self.children, *(other.process for other in self.ray_servers.values() if other is not None)})
            for key, _ in self.watched.select(REAP_EVERY_S):
                if self.watched.get_map().get(key.fd) == key:  # else another event of the same round has removed it
                    key.data()
                if not self.is_open and not self.children:
                    return

    def run_adopting(self, end: int | TextIO) -> None:
        """Do the same for a process's only server, and also end what the processes have left behind in sessions of their own."""
        adopt_orphans()
        self.adopts = True
        self.run(end)
        end_below(os.getpid())

    def _kill(self) -> None:
        """Kill all processes, those of the other servers included."""
        for process in self.children:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for other in filter(None, self.ray_servers.values()):
            other.close()
            os.waitpid(other.process, 0)
        self.children.clear()
        self.is_open = False

    def _take(self) -> None:
        """Fork a process for the next client. None for a client that is gone, or if the fork fails."""
        received: list[int] = []
        client = None if self.of_ray else self.source.accept()[0]
        try:
            if client is None:
                received, content = _receive(self.source, 1 + len(STREAMS))
                client = socket.socket(fileno=received.pop(0))
            else:
                received, content = _receive(client, len(STREAMS))
            command, environment, folder = read_request(content)
            if (server := self._ray_server(command, environment, (client.fileno(), *received))) is not None:
                socket.send_fds(server.clients, [len(content).to_bytes(4, "big")], [client.fileno(), *received])
                server.clients.sendall(content)
            else:
                self._fork(client, received, command, environment, folder)
                client = None
        except (OSError, ValueError):
            if self.of_ray and client is None:  # the other server has no more
                self.is_open = False
                self.watched.unregister(self.source)
        finally:
            if client is not None:
                client.close()
            for stream in received:
                os.close(stream)

    def _fork(self, client: socket.socket, streams: list[int], command: list[str], environment: dict[str, str], folder: str) -> None:
        if (process := os.fork()) == 0:
            self._leave()
            client.close()
            _become_worker(command, environment, folder, streams)
        ended = os.pidfd_open(process)
        self.children[process] = client, ended
        self.watched.register(client, selectors.EVENT_READ, lambda: self._end(process, killed=True))
        self.watched.register(ended, selectors.EVENT_READ, lambda: self._end(process))

    def _end(self, process: int, killed: bool = False) -> None:
        """Pass a process's exit status on to its client, or kill the process of a client that was killed."""
        client, ended = self.children.pop(process)
        if killed:
            os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        for event in (client, ended):
            self.watched.unregister(event)
        with suppress(OSError):  # killed
            client.sendall(bytes([status % 256]))
        client.close()
        os.close(ended)

    def _leave(self) -> None:
        """Close in a forked process what is this server's."""
        files = [key.fileobj for key in self.watched.get_map().values() if isinstance(key.fileobj, int)]  # of raylets and processes
        self.watched.close()
        self.source.close()
        for file in files:
            os.close(file)
        for other in filter(None, self.ray_servers.values()):
            other.close()
        for client, _ in self.children.values():
            client.close()

    def _ray_server(self, command: list[str], environment: dict[str, str], request: Iterable[int]) -> _RayServer | None:
        """Return the server for this worker of Ray. None for other processes, and if the server has ended.

        `request`: file descriptors of the client and its streams. A new server does not keep them: it gets each client's by `clients`.
        """
        if self.of_ray or not "".join(command[1:2]).endswith(SETUP_WORKER) or "RAY_RAYLET_PID" not in environment:
            return None
        key = tuple(sorted(environment.items()))
        if key not in self.ray_servers:
            raylet = os.pidfd_open(int(environment["RAY_RAYLET_PID"]))
            clients, theirs = socket.socketpair()
            end, lifeline = os.pipe()
            failed = self.source.getsockname() + FAILED
            if (process := os.fork()) == 0:
                self._leave()
                clients.close()
                for file in (raylet, lifeline, *request):
                    os.close(file)
                _serve_ray(theirs, end, self.more, environment, failed)
            theirs.close()
            os.close(end)
            self.ray_servers[key] = made = _RayServer(process, clients, lifeline)
            ended = os.pidfd_open(process)
            self.watched.register(raylet, selectors.EVENT_READ, lambda: self._forget(raylet, made.clients.close))
            self.watched.register(ended, selectors.EVENT_READ, lambda: self._forget(ended, lambda: self._reap(key)))
        return self.ray_servers[key]

    def _forget(self, event: int, then: Callable[[], None]) -> None:
        self.watched.unregister(event)
        os.close(event)
        then()

    def _reap(self, key: tuple[tuple[str, str], ...]) -> None:
        """Look after a server whose raylet and workers have ended, or that has failed."""
        if (ended := self.ray_servers[key]) is not None:
            ended.close()
            os.waitpid(ended.process, 0)
        self.ray_servers[key] = None


def _serve_ray(source: socket.socket, end: int, more: Sequence[str], environment: dict[str, str], failed: str) -> NoReturn:
    """Import Ray with the environment of workers, and fork them. `source`, `end`: see `_Server`. `failed`: file for what went wrong."""
    from rlhfless_ray.local.fast_imports import fast_imports

    os.environ.clear()
    os.environ.update(environment)
    try:
        with fast_imports():
            _import_those_there(OF_RAY)
            _import_those_there(more)
        _check_threads()
        _Server(source, more, of_ray=True).run_adopting(end)
    except BaseException as error:
        traceback.print_exc()
        Path(failed).write_text(one_line_with_type(error, MAX_FAILURE_CHARS))
    finally:
        os._exit(0)


def _import_those_there(modules: Iterable[str]) -> None:
    for module in modules:
        with suppress(ImportError):
            import_module(module)


def _check_threads() -> None:
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"a process must not fork that has {threads} threads")


def _become_worker(command: list[str], environment: dict[str, str], folder: str, streams: list[int]) -> NoReturn:
    """Do what a command of Python does, in a forked process, and exit: `python setup_worker.py …`, `python -m …` or `python FILE …`."""
    import atexit
    import runpy
    import tempfile

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
