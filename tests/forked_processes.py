"""Run tests in several processes that are forked from the one that has collected them.

Imports and collection, 11 CPU seconds, are done once. The processes take whole files as they become idle.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

# Files whose tests read what one process makes in minutes, by folder and names: another process would only wait for it.
TOGETHER = {"tests/learn/": ("test_critic.py", "test_learner.py", "test_lora.py")}
OUTLIVE_FORKS = {"jemalloc_bg_thd"}  # threads of libraries that start them anew in a forked process: pyarrow's
NUMBER_BYTES = 2  # of a unit's number in the queue


def unit_of(file: str) -> str:
    """What a process is given at once: the file, or the folder's files in `TOGETHER`."""
    folder, slash, name = file.rpartition("/")
    return folder + slash + ("" if name in TOGETHER.get(folder + slash, ()) else name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="number of forked processes that run the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in `--processes` processes, and report what they tell."""
    config = session.config
    count = config.getoption("processes")
    if count < 2 or config.option.collectonly or session.testsfailed:
        return None
    units: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        units.setdefault(unit_of(item.nodeid.partition("::")[0]), []).append(item)
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    if (threads := sum(name not in OUTLIVE_FORKS for name in names)) > 1:
        raise pytest.UsageError(f"a process must not fork that has {threads} threads: set OPENBLAS_NUM_THREADS=1, or start them in tests")
    queue, feed = os.pipe()  # every process reads the number of its next unit
    os.write(feed, b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in range(len(units))))
    os.close(feed)
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # the same for all
    sys.stdout.flush()
    listening: dict[Connection, int] = {}
    for _ in range(count):
        ours, theirs = Pipe(duplex=False)
        process = os.fork()
        if process == 0:
            _become_worker(config, [*units.values()], queue, theirs)
        theirs.close()
        listening[ours] = process
    left, codes = {item.nodeid: item for item in session.items}, []
    while listening:
        for connection in wait([*listening]):
            assert isinstance(connection, Connection)
            try:
                hook, arguments = connection.recv()
            except EOFError:
                codes.append(os.waitstatus_to_exitcode(os.waitpid(listening.pop(connection), 0)[1]))
                continue
            _report(config, hook, arguments)
            if hook == "pytest_runtest_logfinish":
                del left[arguments["nodeid"]]
        if session.shouldfail or session.shouldstop:
            os.read(queue, NUMBER_BYTES * len(units))  # no process finds another unit
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    for item in left.values():
        said = f"not finished: the processes of the tests ended with {codes}"
        config.hook.pytest_runtest_logreport(report=pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call"))
    return True


def _report(config: pytest.Config, hook: str, arguments: dict[str, Any]) -> None:
    """Call a hook of pytest as the process of the test did."""
    if hook == "pytest_runtest_logreport":
        arguments["report"] = config.hook.pytest_report_from_serializable(config=config, data=arguments["report"])
    call = getattr(config.hook, hook)
    if hook == "pytest_warning_recorded":
        call.call_historic(kwargs=arguments)
    else:
        call(**arguments)


class Reporter:
    """Tell the process that prints what happens to the tests of this one."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.connection.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.connection.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("pytest_runtest_logreport", {"report": data}))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        arguments = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self.connection.send(("pytest_warning_recorded", arguments))


def _become_worker(config: pytest.Config, units: list[list[pytest.Item]], queue: int, connection: Connection) -> NoReturn:
    """Run units from the queue until it is empty, and exit."""
    code = 1
    try:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files would be those of all processes
        capture.start_global_capturing()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(Reporter(config, connection))
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(torch.get_num_threads())  # its pool of threads is made anew, in which several threads at once fail

        def take() -> list[pytest.Item]:
            number = os.read(queue, NUMBER_BYTES)
            return units[int.from_bytes(number, "big")] if number else []

        _run(take)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _run(take: Callable[[], list[pytest.Item]]) -> None:
    """Run units of tests. A test is told the next one, for which its fixtures stay."""
    unit = take()
    while unit:
        for item, following in pairwise(unit):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        after = take()
        unit[-1].config.hook.pytest_runtest_protocol(item=unit[-1], nextitem=after[0] if after else None)
        unit = after
