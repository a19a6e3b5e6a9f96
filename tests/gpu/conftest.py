"""Fixtures for the tests on an accelerator: hosts, which start and work side by side, and a file of figures.

RLHFLESS_GPU_RESULTS names the file: a line of JSON for each figure, written at once. RLHFLESS_GPU_TESTS_ON=cpu runs these tests without
an accelerator, as far as they can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.local.machine_memory import visible_gpus
from tests.gpu.hosts import ON, Host, write_figures

ORDER = (  # what matters most is first; files that are not named here are last
    *("test_gpu_families", "test_gpu_speculation", "test_gpu_continuations", "test_gpu_precision"),
    *("test_gpu_learner", "test_gpu_batch_invariance", "test_gpu_more_families"),
)
NONE_VISIBLE = "needs an accelerator, and no GPU is visible here (RLHFLESS_GPU_TESTS_ON=cpu runs what can run without one)"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip without an accelerator. Items of this folder keep their places among the others, in the order of ORDER."""
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    mine = sorted(
        (items[place] for place in places), key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER)
    )
    for place, item in zip(places, mine, strict=True):
        items[place] = item
        if ON != "cpu" and not visible_gpus():
            item.add_marker(pytest.mark.skip(reason=NONE_VISIBLE))


class Hosts:
    """The hosts of a session by name, started when they are first named."""

    def __init__(self, scratch: Path) -> None:
        from tests.gpu.lanes import Lanes

        self.scratch, self.lanes = scratch, Lanes(self)
        self.by_name: dict[str, Host] = {}

    def get(self, kind: str, name: str, **environment: str) -> Host:
        """Return the host of this name, of a class in `tests.gpu.hosts`."""
        if name not in self.by_name:
            self.by_name[name] = Host(kind, self.scratch / name, environment)
            self.by_name[name].send("warm_up")
        return self.by_name[name]


@pytest.fixture(scope="session")
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Start what the selected tests need, all at once: each of their files has a `begin(hosts, items)`."""
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    files: dict[Any, list[pytest.Item]] = {}
    for item in request.session.items:
        if begin := getattr(getattr(item, "module", None), "begin", None):
            files.setdefault(begin, []).append(item)
    for begin, items in files.items():
        begin(made, items)
    yield made
    made.lanes.end()
    for host in made.by_name.values():
        host.close()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Write figures with the test's name and its seconds so far."""
    start = time.perf_counter()

    def write(**figures: Any) -> None:
        write_figures(test=request.node.name, s=round(time.perf_counter() - start, 2), **figures)

    return write
