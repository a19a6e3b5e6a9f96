"""The private Ray: apart from the driver's process group, and gone with everything it wrote."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfless_ray.local.laptop import fork_server, forked_workers
from rlhfless_ray.local.laptop.fork_client import FAILED, STREAMS, read_request, write_request
from rlhfless_ray.local.laptop.forked_workers import worker_prefix
from rlhfless_ray.local.laptop.local_ray import WORKER_PREFIX, local_ray
from rlhfless_ray.local.private_ray import lock, temporary_folder
from tests.conftest import ROOT, environment, lives

SCRIPT = """
import json, os, signal, tempfile, time
import psutil, ray
from rlhfless_ray import Recipe
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.local.laptop.local_ray import local_ray

with local_ray():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
ray.shutdown()

nodes = [{"cpus": 1}, {"cpus": 2, "labels": {"market": "spot"}}]
tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "cluster": {"local_nodes": nodes}}
cluster = RayCluster(Recipe.parse(tree))
cluster.start()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.killpg(0, signal.SIGTERM)
time.sleep(1)

@ray.remote(num_cpus=0, label_selector={"market": "spot"})
def where():
    return tempfile.gettempdir()

said = {"worker": ray.get(where.remote(), timeout=150), "own": str(cluster.temporary), "driver": tempfile.gettempdir()}
said["processes"] = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
said["cores"] = sorted(node["Resources"]["CPU"] for node in ray.nodes())
raylets = [child for child in psutil.Process().children(recursive=True) if child.name() == "raylet"]
cluster.stop()
said["raylets"] = len(raylets), len(psutil.wait_procs(raylets, timeout=60)[1])
print(json.dumps({**said, "left": cluster.temporary.exists(), "TMPDIR": os.environ.get("TMPDIR")}))
"""


@pytest.mark.ray
def test_a_signal_to_the_drivers_group_leaves_ray_alone_and_its_files_go_with_it() -> None:
    """Also in a process that had a Ray before, whose token Ray remembers: it gets one of its own."""
    kept = {k: v for k, v in environment().items() if k != "TMPDIR"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=200, start_new_session=True
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["worker"] == said["own"] != said["driver"]
    assert said["left"] is False and said["TMPDIR"] is None
    assert said["cores"] == [1.0, 2.0] and said["raylets"] == [2, 0]
    names = " ".join(said["processes"])
    not_started = ("dashboard.py", "DashboardAgent", "RuntimeEnvAgent", "monitor.py")
    assert "agent_stand_in.py" in names and not [one for one in not_started if one in names], names


FORKED = """
import json, os, signal, socket, subprocess, sys
import psutil, ray
from rlhfless_ray import Recipe
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.local.laptop.forked_workers import worker_prefix
from rlhfless_ray.local.laptop import local_ray

tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "cluster": {"cpus": 1}}
cluster = RayCluster(Recipe.parse(tree), architectures=[], engines=False)  # vLLM is most of what a server imports
cluster.start()

@ray.remote(num_cpus=0)
class Worker:
    def about(self):
        return os.getpid(), "deepspeed" in sys.modules, os.environ.get("NAME"), len(os.listdir("/proc/self/task"))

    def drawn(self):
        return os.getppid(), ray.get_runtime_context().get_job_id(), ray._raylet.ActorClassID.from_random().hex()

def by_server(worker):  # from a process of its own that has imported Ray
    return psutil.Process(worker).parent().ppid() == server.pid

environments = {"NAME": "a"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
workers = [Worker.options(runtime_env={"env_vars": variables}).remote() for variables in environments]
server = cluster.fork_server.process
(forked, *rest), (own, *others) = ray.get([worker.about.remote() for worker in workers], timeout=150)
said = {"forked": rest[:2], "own": others[:2], "child": by_server(forked)}
os.kill(forked, signal.SIGKILL)
try:
    ray.get(workers[0].about.remote(), timeout=60)
except ray.exceptions.RayActorError:
    said["killed"] = True
for content in (b"", (5).to_bytes(4, "big") + b"{"):  # a client that is killed before it has said anything, or all
    client = socket.socket(socket.AF_UNIX)
    client.connect(cluster.fork_server.address)
    client.send(content)
    client.close()
later = Worker.options(runtime_env={"env_vars": {"NAME": "b"}})  # a new process, not one that was started before the server was there
said["after"] = by_server(ray.get(later.remote().about.remote(), timeout=60)[0])
more = [later.remote() for _ in range(2)]
parents, jobs, ids = map(set, zip(*ray.get([worker.drawn.remote() for worker in more], timeout=60)))
said["together"] = [len(parents), jobs == {ray.get_runtime_context().get_job_id()}, len(ids)]
os.environ["RLHFLESS_WORKER_PREFIX"] = worker_prefix(cluster.fork_server.address)
told = "import os, sys, weakref; print(os.getppid(), 'deepspeed' in sys.modules, *sys.argv[1:], input())"
told += "; print(any(one.atexit for one in weakref.finalize._registry))"
open(sys.argv[1], "w").write(told)
commands = ["-m", "base64", "-e"], [sys.argv[1], "argument"]
encoded, script = (subprocess.check_output(local_ray.forked([sys.executable, *more]), input=b"word").decode().split() for more in commands)
said["module"], said["script"] = encoded, [int(script[0]) == server.pid, *script[1:]]
del os.environ["RLHFLESS_WORKER_PREFIX"]
said["not forked"] = local_ray.forked(["python"])
cluster.stop()
said["left"] = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
print(json.dumps({**said, "server": server.poll() is not None, "prefix": os.environ.get("RLHFLESS_WORKER_PREFIX")}))
"""


@pytest.mark.ray
def test_workers_are_forked_unless_a_variable_counts_when_a_program_is_loaded(tmp_path: Path) -> None:
    kept = {k: v for k, v in environment().items() if k != WORKER_PREFIX}
    ended = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "script.py")], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said == {
        "forked": [True, "a"],
        "own": [False, None],
        "child": True,
        "killed": True,
        "after": True,
        "together": [1, True, 2],
        "module": ["d29yZA=="],
        "script": [True, "True", "argument", "word", "False"],
        "not forked": ["python"],
        "left": [],
        "server": True,
        "prefix": None,
    }


def test_a_fork_that_fails_ends_one_worker_and_not_the_server_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(fork_server.os, "fork", fail)
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
        listening.bind(str(tmp_path / "fork"))
        listening.listen(1)
        client.connect(str(tmp_path / "fork"))
        wanted = write_request(["python", "script.py"], {}, ".")
        socket.send_fds(client, [len(wanted).to_bytes(4, "big")], STREAMS)
        client.sendall(wanted)
        server = fork_server._Server(listening, ())
        before = len(os.listdir("/proc/self/fd"))
        server._take()
        assert client.recv(1) == b"" and len(os.listdir("/proc/self/fd")) == before


def test_a_child_that_ends_with_the_server_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listening, subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(fork_server.os, "fork", lambda: process.pid)
        server = fork_server._Server(listening, ())
        server._fork(socket.socket(socket.AF_UNIX), [], [], {}, "")
        end, closed = os.pipe()
        os.close(closed)
        select = server.watched.select
        monkeypatch.setattr(server.watched, "select", lambda timeout: sorted(select(timeout), key=lambda event: event[0].fileobj != end))
        server.run(end)
        assert not server.is_open and not server.children


SETUP = ["python", "ray/_private/workers/setup_worker.py"]


def fork_ray_servers(folder: Path, count: int) -> None:
    """Fork servers for workers of Ray, one after the other, and wait for their ends."""
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client, (folder / "stream").open("w") as stream:
        listening.bind(str(folder / "fork"))
        server = fork_server._Server(listening, ())
        for number in range(count):
            environment = {"RAY_RAYLET_PID": str(os.getpid()), "RESULT": str(folder / f"files{number}")}
            request = os.dup(client.fileno()), os.dup(stream.fileno())
            made = server._ray_server(SETUP, environment, request)
            for file in request:
                os.close(file)
            assert made is not None
            os.waitid(os.P_PID, made.process, os.WEXITED | os.WNOWAIT)
        server._kill()


def open_files() -> dict[str, int]:
    """Return how many sockets, pipes, anonymous files and files of each name this process has open."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    names = Counter(os.readlink(link) for link in links if os.path.islink(link))  # not that of the listing, which is closed
    kinds = Counter[str]()
    for name, count in names.items():
        kinds[name.partition(":[")[0] if name.startswith(("socket", "pipe")) else name] += count
    return dict(kinds)


def test_a_server_for_workers_of_ray_keeps_nothing_of_its_first_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the client, which waits for the end of its connection, would wait for the end of that server."""

    def serve_ray(source: socket.socket, end: int, more: object, environment: dict[str, str], failed: str) -> None:
        Path(environment["RESULT"]).write_text(json.dumps(open_files()))
        os._exit(0)

    before = open_files()
    monkeypatch.setattr(fork_server, "_serve_ray", serve_ray)
    fork_ray_servers(tmp_path, 2)
    own = Counter({"socket": 2, "pipe": 1, str(tmp_path / "stream"): 1})  # the test's client and stream, and where clients come from
    assert Counter(json.loads((tmp_path / "files1").read_text())) <= Counter(before) + own


def test_a_server_for_workers_of_ray_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("too many threads")

    monkeypatch.setattr(fork_server, "_import_those_there", lambda _: None)
    monkeypatch.setattr(fork_server, "_check_threads", fail)
    fork_ray_servers(tmp_path, 1)
    assert (tmp_path / f"fork{FAILED}").read_text() == "RuntimeError: too many threads"


def test_a_request_has_every_word_as_it_was() -> None:
    command, environment = ["python", "", "-c", "print('a=b')\n"], {"A": "", "B": "c=d", "C": "e\udcff\n"}
    assert read_request(write_request(command, environment, "/a b")) == (command, environment, "/a b")
    with pytest.raises(ValueError):
        read_request(b"")


@pytest.mark.parametrize("failed", ["while it imported", "later"])
def test_a_worker_runs_by_itself_where_the_server_has_failed(tmp_path: Path, failed: str) -> None:
    address = str(tmp_path / "fork")
    if failed == "later":
        socket.socket(socket.AF_UNIX).bind(address)
    else:
        Path(address + FAILED).touch()
    command = [*shlex.split(worker_prefix(address)), sys.executable, "-c", "print('by itself')"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=20).stdout == "by itself\n"


BROKEN = """
from rlhfless_ray.local.laptop import fork_server

fork_server._import_everything = lambda *_: compile("1 +", "broken.py", "exec")
fork_server.serve(ADDRESS, [], [], True)
"""


@pytest.mark.parametrize(
    ("program", "why"),
    [(BROKEN, "SyntaxError: invalid syntax (broken.py, line 1)"), ("import os; os._exit(3)", "it ended with exit code 3")],
)
def test_a_server_that_fails_says_why_once(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = program.replace("ADDRESS", repr(str(tmp_path / "fork")))
    monkeypatch.setattr(forked_workers, "server_command", lambda *_: [sys.executable, "-c", code])
    server = forked_workers.ForkServer(tmp_path, (), engines=True)
    server.process.wait(60)
    server.watch.join(60)
    assert capfd.readouterr().err == f"note: workers cannot be forked, so each imports everything itself: {why}\n"


def test_a_server_that_is_closed_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(forked_workers, "server_command", lambda *_: [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(1)"])
    server = forked_workers.ForkServer(tmp_path, (), engines=True)
    server.close()
    server.watch.join(60)
    assert server.process.returncode == 1 and capfd.readouterr().err == ""


@pytest.mark.parametrize(("closed", "killed"), [(False, False), (False, True), (True, False)])
def test_a_failure_to_import_ray_is_told_once(
    closed: bool, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forked_workers, "server_command", lambda *_: ["cat"])
    monkeypatch.setattr(forked_workers, "LOOK_EVERY_S", 100.0 if closed else 0.05)
    monkeypatch.setattr(forked_workers, "END_S", 5.0 if closed else 0.05)
    server = forked_workers.ForkServer(tmp_path, (), engines=True)
    Path(server.address + FAILED).write_text("RuntimeError: too many threads")
    said, end = "", time.monotonic() + 20
    while not closed and not said and time.monotonic() < end:
        said = capfd.readouterr().err
        time.sleep(0.01)
    if killed:
        server.process.kill()
        server.watch.join(20)
    server.close()
    later = "note: workers cannot be forked, so each imports everything itself: it ended with exit code -9\n" if killed else ""
    assert said + capfd.readouterr().err == (
        "note: workers are forked without Ray, so each imports it itself: RuntimeError: too many threads\n" + later
    )
    assert closed or said


IDS = """
import os, sys
from importlib import import_module
from tests.warm_workers import MORE
from rlhfless_ray.local.laptop.fork_server import OF_ENGINES, OF_RANKS, OF_RAY, OF_RAY_TRAIN

for module in (*OF_RAY, *OF_ENGINES, *OF_RANKS, *OF_RAY_TRAIN, *MORE):
    import_module(module)
from ray._raylet import ActorClassID

for _ in range(2):
    if os.fork() == 0:
        print(ActorClassID.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_no_module_that_is_imported_before_a_fork_has_drawn_an_id_of_rays() -> None:
    """All forked processes would draw the same ones afterwards. A module that defines an actor class draws one."""
    drawn = subprocess.run([sys.executable, "-c", IDS], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200).stdout
    assert len(set(drawn.split())) == 2, drawn


FORKS = """
import collections, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import rlhfless_ray
import grpc

server = grpc.server(ThreadPoolExecutor(2))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
grpc.channel_ready_future(channel).result(60)
print(collections.Counter(subprocess.Popen([sys.executable, "-c", ""], preexec_fn=int).wait() for _ in range(20)))
channel.close()
server.stop(None)
"""


@pytest.mark.slow  # imports in a process of its own
def test_processes_that_ray_starts_outlive_grpcs_fork_handlers() -> None:
    """These, which a run with the prefix service leaves in a notebook, crash few children only, but tell of every one."""
    kept = {k: v for k, v in environment().items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=200)
    assert ended.stdout.splitlines() == ["Counter({0: 20})"] and "fork" not in ended.stderr, ended.stdout + ended.stderr


LATE = """
import ray
from rlhfless_ray import Recipe
from rlhfless_ray.cli.guarded import guarded
from rlhfless_ray.local.cluster import RayCluster

def init(**options):
    raise Exception("The current node timed out during startup. This could happen because ...")

ray.init = init
cluster = RayCluster(Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}}))
guarded(cluster.start)
"""


@pytest.mark.slow  # imports in a process of its own
def test_a_ray_that_does_not_come_up_in_time_is_a_sentence_and_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    said = "run failed: a private Ray did not start on this machine: The current node timed out during startup."
    assert ended.returncode == 1 and said in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


def test_folders_of_killed_runs_are_removed_and_those_of_living_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("rlhfless_ray.local.private_ray.len", lambda _: 0, raising=False)  # pytest's folders have long names
    dead, young, living, other = (tmp_path / name for name in ("rlhfless-ray-a", "rlhfless-ray-b", "rlhfless-ray-c", "mine"))
    for folder in (dead, young, living, other):
        (folder / "ray").mkdir(parents=True)
        if folder is not young:
            os.utime(folder, (time.time() - 100,) * 2)
    handle = lock(living)
    assert handle is not None and lock(living) is None
    own = temporary_folder()
    assert own.parent == tmp_path and lock(own) is None
    assert not dead.exists() and young.exists() and living.exists() and other.exists()
    os.close(handle)


def test_a_node_that_is_slow_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    clock, answers = itertools.count(0.0, 40.0), iter([None, None, "known", None, None, None, None, None])

    def find(address: str, node: str) -> str:
        if (answer := next(answers)) is None:
            raise RuntimeError("no such node")
        return answer

    monkeypatch.setattr(services, "get_node", find)
    monkeypatch.setattr("rlhfless_ray.local.laptop.local_ray.time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    with local_ray():
        assert services.get_node("here", "node") == "known"
        with pytest.raises(RuntimeError):
            services.get_node("here", "node")
    assert services.get_node is find and list(answers) == [None]


def test_a_ray_that_it_was_not_tried_with_starts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.node import Node

    whole = Node.start_monitor
    with local_ray():
        assert Node.start_monitor is not whole
    monkeypatch.setattr("ray.__version__", "9.9.0")
    with local_ray():
        assert Node.start_monitor is whole


ADOPTING = """
import os, socket, subprocess, sys
from rlhfless_ray.local.laptop import fork_server
def work(command, environment, folder, streams):
    daemon = ["setsid", "--fork", "sh", "-c", "echo $$ >> daemons; exec sleep 300"]
    subprocess.run(daemon, env={"PATH": "/usr/bin:/bin"})  # with no environment and no parent, as sandboxes are
    while not os.path.exists("daemons"):
        pass
    os._exit(0)
fork_server._become_worker = work
server = fork_server._Server(socket.socket(socket.AF_UNIX), ())
ours, theirs = socket.socketpair()
server._fork(theirs, [], [], {}, "")
server.source.bind("source")
server.source.listen(1)
server.run_adopting(sys.stdin)
"""


def test_what_a_worker_leaves_in_another_session_ends_with_its_server(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ADOPTING], cwd=tmp_path, stdin=subprocess.PIPE, env=environment()) as server:
        end_s = time.monotonic() + 60
        while not ((note := tmp_path / "daemons").exists() and note.read_text().strip()) and time.monotonic() < end_s:
            time.sleep(0.01)
        daemon = int(note.read_text())
        assert lives(daemon), "it outlives the worker"
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(60) == 0 and not lives(daemon)
