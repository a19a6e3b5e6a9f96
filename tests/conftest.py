"""Shared by all tiers: where things are, a small recipe, and one Ray for the tests that need one."""

from __future__ import annotations

import atexit
import csv
import functools
import gc
import importlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import yaml
from filelock import FileLock
from hypothesis import HealthCheck, settings

import rlhfless_ray  # noqa: F401 - sets what has to be set before grpc is loaded
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.local.laptop.local_ray import WORKER_PREFIX, forked
from tests import warm_workers

ROOT = Path(__file__).resolve().parents[1]

# No deadline and no complaint about slow draws: both measure a busy machine. What passed here passes everywhere. The examples are the same
# each time, so more of them would be paid for in every run and find nothing new.
settings.register_profile("same", derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
# `--hypothesis-profile=search` looks for more
settings.register_profile("search", settings.get_profile("same"), derandomize=False, max_examples=500)
settings.load_profile("same")

REWARD = '''
def shorter(prompt, response, row):
    """Any reward with a gradient will do: short responses are better."""
    return -len(response) / 10
'''


def small_recipe(folder: Path, **overrides: Any) -> dict[str, Any]:
    """A recipe of a few seconds: four steps, a policy of 0.1 M parameters without warm start, a reward from a file, as many engines
    as it needs (one unless told)."""
    (folder / "reward_file.py").write_text(REWARD)
    tree: dict[str, Any] = {
        "run": {"name": "small", "root": str(folder / "runs"), "steps": 4, "seed": 3},
        "policy": {"hidden_size": 64, "layers": 2},
        "prompts": {"task": "chain", "batch_prompts": 8, "rows": 64},
        "evaluate": {"prompts": 8},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 24, "kv_cache_mb": 64, "max_running": 64},
        "reward": {"function": f"{folder / 'reward_file.py'}:shorter"},
        "learner": {"learning_rate": 0.001},
        "checkpoint": {"every_steps": 2},
        "watch": {"progress": "plain", "tensorboard": False, "wandb": "off", "samples_per_step": 0},
    }
    for key, value in overrides.items():
        section, _, field = key.partition("__")
        tree.setdefault(section, {})[field] = value
    tree["rollout"].setdefault("max_actors", tree["rollout"].get("min_actors", 1))
    return tree


def write_recipe(folder: Path, **overrides: Any) -> str:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(small_recipe(folder, **overrides)))
    return str(path)


def samples(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run `rlhfless …` as a user would and return what it said."""
    return subprocess.run(
        [sys.executable, "-m", "rlhfless_ray", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=more.pop("cwd", ROOT),
        env=environment(),
        **more,
    )


def command_here(*arguments: str, module: str = "rlhfless_ray.cli.main", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `rlhfless …`, or the `main` of another module, in this process and return what it said. Spares a process and its imports.
    A run is made on the Ray that there is (`private_ray`), or on one of its own (`no_ray`)."""
    said, complained = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(said), redirect_stderr(complained):
        patched.setattr(sys, "argv", ["rlhfless", *arguments])
        patched.setattr(os, "_exit", sys.exit)
        patched.delenv("RAY_ADDRESS", raising=False)
        patched.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main()
    return subprocess.CompletedProcess(arguments, ended.value.code or 0, said.getvalue(), complained.getvalue())  # type: ignore[arg-type]


def environment() -> dict[str, str]:
    """Ours, without a Ray of the machine and with the repository importable from anywhere."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "WANDB_API_KEY")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def lives(process: int) -> bool:
    """Whether a process of that id is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:  # gone, perhaps between opening and reading
        return False


@pytest.fixture
def short_csv_fields() -> Iterator[None]:
    """Python's own limit, whatever a library has made of it in this process."""
    before = csv.field_size_limit(131_072)
    yield
    csv.field_size_limit(before)


TIERS = ("ray", "engine", "learner", "slow", "gpu", "long")  # their meaning: pyproject.toml; a test with none of these markers is `pure`

# Fixtures that start what their tier is named after: whoever uses one is of that tier.
FIXTURE_TIERS = {
    "ray_cluster": ("ray",),
    "no_ray": ("ray",),
    "private_ray": ("ray",),
    "uninterrupted": ("ray", "engine"),
    "new_engine": ("engine",),
    "cases": ("learner",),
}


# A file whose tests are all of other tiers, by its own words. A session of pure tests does not import it.
OTHER_TIERS = re.compile(rf"^pytestmark = .*\bpytest\.mark\.(?:{'|'.join(TIERS)})\b", re.MULTILINE)
# What a file has with a test that is not pure. A session without pure tests imports no other: that is two thirds of all.
COSTLY = re.compile(rf"\bpytest\.mark\.(?:{'|'.join(TIERS)})\b|\b(?:{'|'.join(FIXTURE_TIERS)})\b")
WITHOUT_PURE = ("not pure and not long", "long")  # the Makefile's selections


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    selected = config.option.markexpr
    if collection_path.suffix != ".py" or selected not in ("pure", *WITHOUT_PURE):
        return None
    text = collection_path.read_text()
    return True if (OTHER_TIERS.search(text) if selected == "pure" else not COSTLY.search(text)) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Complete the markers of tiers, and sort: the longest first, which are files with engines or a Ray of their own, then learners.
    Files that share one Ray follow one another: first those of runs, last those of leases and pools."""
    private.update(item.path for item in items if "private_ray" in getattr(item, "fixturenames", ()))
    ranks: dict[Path, int] = {}
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            for tier in FIXTURE_TIERS.get(fixture, ()):
                if item.get_closest_marker(tier) is None:
                    item.add_marker(tier)
        tiers = {tier for tier in TIERS if item.get_closest_marker(tier)}
        if not tiers:
            item.add_marker("pure")
        alone = "engine" in tiers or "no_ray" in getattr(item, "fixturenames", ())
        rank = 0 if item.path in private else 2 if alone else 3 if "learner" in tiers else 4 if "ray" in tiers else 5
        ranks[item.path] = 1 if item.path.name in WAITING else min(rank, ranks.get(item.path, rank))
    for path in {item.path for item in items if item.get_closest_marker("pure") is None}:
        if not COSTLY.search(path.read_text()):  # `make test` would run them in neither of its sessions
            raise pytest.UsageError(f"{path} has tests that are not pure and names neither a tier nor one of {', '.join(FIXTURE_TIERS)}")
    items.sort(key=lambda item: ranks[item.path])


private: set[Path] = set()  # files with tests that use `private_ray`
WAITING = ("test_shared_pool.py",)  # replayed runs, which mostly wait: early, so that other files have the cores meanwhile


# Files whose tests read what one process makes in minutes, by folder and names: another process would only wait for it.
TOGETHER = {"tests/learn/": ("test_critic.py", "test_learner.py", "test_lora.py")}


def unit_of(file: str) -> str:
    """What a process of pytest is given at once: the file, or the folder's files in `TOGETHER`."""
    folder, slash, name = file.rpartition("/")
    return folder + slash + ("" if name in TOGETHER.get(folder + slash, ()) else name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, and those of `TOGETHER` to the same one."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(super()._split_scope(nodeid))

    return Together(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork xdist's processes from the tests' server, which has imported what most of their tests need: vLLM, too, unless all are pure."""
    from execnet import XSpec

    warm_workers.start(config._tmp_path_factory.getbasetemp(), engines=config.option.markexpr != "pure")  # type: ignore[attr-defined]
    python = shlex.join(forked([sys.executable, "-m", "tests.forked_worker"]))
    specs[:] = [XSpec(f"popen//python={python}") for _ in specs]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what test files import out of garbage collections: each would look through torch and transformers for a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Note whether every test of this session is pure: only then is a processor's time that of the test at work. Collect garbage
    seldom in such a session: it takes 5 % of the time, and nothing in it holds a lease. Models of tests are tiny: a second thread of
    torch would only wait for the first, on a core that other tests need."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    if typer := sys.modules.get("typer.main"):
        typer.get_command = functools.cache(typer.get_command)  # building the command line takes as long as a small plan
    session.config.stash[ONLY_PURE] = only_pure = all(item.get_closest_marker("pure") for item in session.items)
    if only_pure:
        gc.set_threshold(100_000, 20, 20)


ONLY_PURE = pytest.StashKey[bool]()
CPU_BEFORE = pytest.StashKey[float]()
PURE_CPU_S = 20.0  # the most expensive pure tests take 2 to 3 s on a quiet core; a busy or slow machine takes several times that
STARTS_RAY = ("/gcs_server", "/raylet/raylet")
refused: list[str] | None = None  # what the pure test at work tried to start; None outside pure tests


def refuse(tier: str, what: str) -> NoReturn:
    """Raise in the pure test at work, and remember it in case that is caught."""
    assert refused is not None
    refused.append(f"it {what}: mark it `@pytest.mark.{tier}`")
    raise RuntimeError(refused[-1])


class RefuseVllm(MetaPathFinder, Loader):
    """A pure test imports no engine. It may look whether there are any, as transformers does. An audit hook would do, but is called for
    every file and attribute: 2 % of the time."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if refused is not None and fullname == "vllm" else None

    def exec_module(self, module: ModuleType) -> NoReturn:
        refuse("engine", "imports vllm")


def refuse_ray(execute: Callable[..., None]) -> Callable[..., None]:
    """A pure test starts no Ray. `execute`: of `subprocess.Popen`."""

    def execute_child(process: object, command: Any, *more: Any) -> None:
        if refused is not None:
            words = [os.fsdecode(word) for word in [command] if isinstance(word, str | bytes | os.PathLike)] or map(os.fsdecode, command)
            if any(part in word for word in words for part in STARTS_RAY):
                refuse("ray", "starts a Ray cluster")
        execute(process, command, *more)

    return execute_child


freeze = gc.freeze


def pytest_configure() -> None:
    """Leave it to these hooks what is frozen in this process. Runs and vLLM's engines freeze and at their end unfreeze everything: the
    imports, too, which each collection would then look through."""
    gc.freeze = gc.unfreeze = lambda: None
    sys.meta_path.insert(0, RefuseVllm())
    subprocess.Popen._execute_child = refuse_ray(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


def refuse_process_group(*_: Any, **__: Any) -> None:
    """Stand in for torch.distributed.init_process_group, which DeepSpeed calls too, in a pure test."""
    refuse("learner", "starts a torch.distributed process group")


def pytest_sessionfinish() -> None:
    kept_ray.close()


def pytest_unconfigure() -> None:
    """Print nothing after the summary. Triton's binding would list a page of its own objects when the process ends."""
    if "triton" in sys.modules:
        atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Guard the pure tier, fixtures included: `make check` stays quick only while its tests start nothing heavy."""
    global refused
    if item.get_closest_marker("pure") is None:
        return (yield)
    refused = []
    item.stash[CPU_BEFORE] = cpu_s()
    distributed = sys.modules.get("torch.distributed")
    before = getattr(distributed, "init_process_group", None)
    if before is not None:
        distributed.init_process_group = refuse_process_group
    try:
        return (yield)
    finally:
        refused = None
        if before is not None:
            distributed.init_process_group = before


def cpu_s() -> float:
    """Processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork the workers of the first test's Ray, and of all after it, from one process that has imported everything. End the Ray of
    `private_ray` before the tests of another file."""
    if item.path not in private:
        kept_ray.close()
    if item.get_closest_marker("ray"):
        warm_workers.start(shared_folder(item.config._tmp_path_factory))  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def warm_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`forked` takes the processes that tests start themselves from there, too."""
    warm_workers.start(shared_folder(tmp_path_factory))


@pytest.fixture
def cold_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a server of their run, as a user's are, and not from the tests'."""
    monkeypatch.delenv(WORKER_PREFIX, raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a pure test that started something heavy, or that took too much of a processor."""
    report = yield
    if refused is not None:
        taken = cpu_s() - item.stash[CPU_BEFORE]
        if taken > PURE_CPU_S and item.config.stash[ONLY_PURE]:
            refused.append(
                f"it took {taken:.1f} s of CPU time, fixtures and child processes included (limit: {PURE_CPU_S:g} s): make it cheaper "
                "or mark it `@pytest.mark.slow`"
            )
            item.stash[CPU_BEFORE] = cpu_s()
        if refused:
            report.outcome = "failed"
            said = report.longreprtext and f"{report.longreprtext}\n"
            report.longrepr = f"{said}{item.nodeid} has no tier's marker and so is `pure`, but " + "; ".join(refused)
            refused.clear()
    return report


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of all processes that the tests are spread over."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that costs minutes to make, for all processes that the tests are spread over: the first to need it makes it."""
    folder = shared_folder(tmp_path_factory) / name
    with FileLock(f"{folder}.lock", timeout=880):
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="module", autouse=True)
def page_connector_ends() -> Iterator[None]:
    """vLLM keeps the connector of a process's first engine with prefix KV, also for engines without it, which fail then."""
    yield
    if state := sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state"):
        state.ensure_kv_transfer_shutdown()


@pytest.fixture(scope="module", autouse=True)
def freeze_imports(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep what a file's tests have imported out of later collections, as `pytest_collection` does. Runs collect, and so do benchmarks
    around each measurement: half a second each time beside vLLM."""
    yield
    if not request.config.stash[ONLY_PURE]:
        gc.collect()
        freeze()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps with up to two engines from start to end."""

    def make(folder: Path) -> None:
        done = command("train", write_recipe(folder, rollout__max_actors=2))
        assert done.returncode == 0, done.stderr
        assert "report.html" in done.stdout

    return made_once(tmp_path_factory, "uninterrupted", make) / "runs" / "small"


@pytest.fixture(scope="module")
def ray_cluster() -> None:
    """One local Ray with four logical cores and four logical GPUs, for all tests of leases and pools. It stays between modules; one
    that needs a Ray of its own ends it (`no_ray`), and the next to need it starts it again."""
    import ray

    from rlhfless_ray.local.laptop.local_ray import local_ray

    if not ray.is_initialized():
        with local_ray():
            ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


@pytest.fixture(scope="module")
def no_ray() -> Iterator[None]:
    """For tests that start a Ray of their own in this process: none before, and none after."""
    import ray

    ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture
def unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a run checks before it starts a Ray: they see none, whatever earlier tests have left in this process."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ray := sys.modules.get("ray"):
        monkeypatch.setattr(ray, "is_initialized", lambda: False)


@contextmanager
def one_ray() -> Iterator[None]:
    """One private Ray of two cores for all runs of this process inside the block, as for the stages of a workflow. Needs that there is
    none before. A run that starts its own takes 2 CPU seconds more."""
    from rlhfless_ray.local.cluster import RayCluster
    from rlhfless_ray.recipe import Recipe

    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "cluster": {"cpus": 2}})
    cluster = RayCluster(recipe, store_mb=512, architectures=())
    with pytest.MonkeyPatch.context() as patched:  # `RayCluster.shared` would listen to signals, and Ctrl-C is pytest's
        try:
            cluster.start()
            patched.setattr(RayCluster, "shared_is_private", True)
            yield
        finally:
            cluster.stop()


kept_ray = ExitStack()  # ends the Ray that `private_ray` has started


@pytest.fixture(scope="module")
def private_ray() -> None:
    """One Ray for the runs that tests make in this process. Runs in processes of their own start theirs. It stays between files that
    use it, which follow one another: a start takes two CPU seconds and three of waiting."""
    import ray

    from rlhfless_ray.local.cluster import RayCluster

    if not RayCluster.shared_is_private:
        ray.shutdown()
        kept_ray.enter_context(one_ray())


@contextmanager
def two_nodes(head_cpus: int, cpus: int, store_mb: int) -> Iterator[Any]:
    """A cluster of a head, where the driver is, and a second node, to which nodes can be added. Needs `no_ray`. Ray counts a node whose
    connection is refused as lost after 4 s, instead of 15; one that is slow to answer has as long as elsewhere."""
    import ray
    from ray.cluster_utils import Cluster

    from rlhfless_ray.local.laptop.local_ray import local_ray

    health = {"health_check_period_ms": 500, "health_check_failure_threshold": 7}
    system = {**health, "prestart_worker_first_driver": False}  # a worker for each core, which few actors take: 0.3 CPU seconds each
    head = {"num_cpus": head_cpus, "object_store_memory": store_mb * 2**20, "_system_config": system}
    with local_ray():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=cpus, object_store_memory=store_mb * 2**20)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes(timeout=120)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def two_engines(kind: type, files: dict[str, bytes], settings: EngineSettings, others: EngineSettings | None = None) -> Iterator[Any]:
    """A pool of two started engines, which ends with the block; needs `ray_cluster`. `kind`: their actor class. `others`: settings of
    all engines but the first, those that replace a lost one included."""
    from rlhfless_ray.functions.instance import start_actor
    from rlhfless_ray.functions.lease import LeaseManager
    from rlhfless_ray.functions.ledger import Ledger
    from rlhfless_ray.functions.worker_pool import WorkerPool
    from rlhfless_ray.weights.model_folder import without_weights

    ledger, plain = Ledger("cpu", 1.0), without_weights(files)
    leases = LeaseManager("cpu", ledger, 60.0, f"engines{time.time_ns()}")
    of_each = itertools.chain([settings], itertools.repeat(others or settings))
    made = WorkerPool("rollout", lambda slot: start_actor(kind, slot, "cpu", {}, plain, next(of_each)), leases, 600.0)
    made.resize(2, [], need=2)
    for instance in made.working:
        instance.start_result(300.0)
    yield made
    made.close()
    leases.release_all()
