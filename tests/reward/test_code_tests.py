"""The reward `code`: right and wrong programs in every form of tests, and what the sandbox stops."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rlhfless_ray.reward.code_tests import code_of, code_reward, passes, row_tests
from rlhfless_ray.reward.reward_functions import RewardSource, RewardWorker

ADD = "def add(a, b):\n    return a + b"
IN_OUT = [{"type": "stdin_stdout", "input": "2 3\n", "output": "5\n"}, {"type": "stdin_stdout", "input": "1 1", "output": "2"}]
LIMIT_S = 60.0  # a start is slow on a full machine


def reward(response: str, limit_s: float = LIMIT_S, **row: object) -> float:
    return code_reward("", response, dict(row), tests_column="tests", limit_s=limit_s)


@pytest.mark.parametrize(
    ("code", "row"),
    [
        (ADD, {"tests": ["assert add(2, 3) == 5", "assert add(0, 0) == 0"]}),
        (ADD, {"tests": "def check(candidate):\n    assert candidate(2, 3) == 5", "entry_point": "add"}),
        ("print(sum(map(int, input().split())))", {"tests": json.dumps(IN_OUT)}),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), '')\nsys.exit()", {"tests": IN_OUT}),
        (ADD, {"tests": {"inputs": [[2, 3]], "outputs": [[5]], "fn_name": "add"}}),
        (
            "class Solution:\n    def add(self, a, b):\n        return a + b",
            {"tests": [{"input": "2\n3", "output": "5", "fn_name": "add"}]},
        ),
        ("assert START == 4", {"tests": ["assert START + 1 == 5"], "test_setup_code": "START = 4"}),
    ],
)
def test_a_right_program_earns_one_and_a_wrong_one_nothing(code: str, row: dict) -> None:
    assert reward(f"It is easy:\n```python\n{code}\n```\nDone.", **row) == 1.0
    assert reward(f"```python\n{code.replace('+', '-').replace('sum', 'max').replace('4', '5')}\n```", **row) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "def add(a, b): return 5 / 0",
        "def add(:",
        "x = [0] * 10**10\ndef add(a, b): return a + b",
        "open('big', 'wb').write(b'0' * 10**8)\ndef add(a, b): return a + b",
        "import os\nassert 'RLHFLESS_SECRET' in os.environ\ndef add(a, b): return a + b",
    ],
)
def test_programs_that_must_not_pass(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFLESS_SECRET", "1")
    assert not passes(code, row_tests({"t": ["assert add(2, 3) == 5"]}, "t"), LIMIT_S)


def test_a_program_that_never_ends_earns_nothing_in_time_and_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"import os, time\nos.fork()\nopen({str(pids)!r}, 'a').write(os.readlink('/proc/self') + ' ')\nwhile True: time.sleep(1)"
    started = time.monotonic()
    assert not passes(code, row_tests({"t": ["assert True"]}, "t"), 5.0)
    assert time.monotonic() - started < LIMIT_S
    for pid in pids.read_text().split() if pids.exists() else ():
        status = Path(f"/proc/{pid}/cmdline")
        deadline = time.monotonic() + 10
        while status.exists() and b"sandbox_child" in status.read_bytes():
            assert time.monotonic() < deadline, f"process {pid} of the sandbox is still there"
            time.sleep(0.05)


def test_the_network_is_out_of_reach_where_the_kernel_allows_it() -> None:
    code = "import socket\nnames = [name for _, name in socket.if_nameindex()]\n"
    seen_alone = passes(code, row_tests({"t": ["assert names == ['lo']"]}, "t"), LIMIT_S)
    allowed = os.geteuid() == 0 or Path("/proc/sys/user/max_net_namespaces").read_text().strip() != "0"
    assert seen_alone or not allowed or not _can_unshare()


def _can_unshare() -> bool:
    """Whether this machine lets a process make namespaces; containers often forbid it."""
    import subprocess
    import sys

    code = "import ctypes, sys; c = ctypes.CDLL(None); sys.exit(c.unshare(0x10000000 | 0x40000000) and c.unshare(0x40000000))"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_code_is_the_last_block_of_python() -> None:
    assert code_of("```python\na\n```\n```text\nb\n```") == "a\n"
    assert code_of("```\na\n```\nthen\n```\nb\n```") == "b\n"
    assert code_of("print(1)") == "print(1)"


@pytest.mark.parametrize(("tests", "sentence"), [("[1", "not valid JSON"), ([], "has no tests"), ([{"x": 1}], "neither an assertion")])
def test_a_row_without_tests_is_an_error_of_its_sample(tests: object, sentence: str) -> None:
    worker = RewardWorker(RewardSource("code", "code_reward", answer_column="tests"), timeout_s=5.0)
    (score,) = worker.score([(7, "", ADD, {"tests": tests})])
    assert score.reward is None and sentence in (score.error or "")
