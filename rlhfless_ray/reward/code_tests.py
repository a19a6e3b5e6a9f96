"""The reward `code`: whether a response's Python code passes the tests of its row, each run in a sandbox (`sandbox_child.py`).

The tests are in one column, in one of these forms:

- assertions, as a text or a list of texts (MBPP's `test_list`). HumanEval's `test` with a column `entry_point` is called with it,
- pairs of standard input and output: a list of `{"input": …, "output": …}`, or `{"inputs": […], "outputs": […]}`. With `fn_name` the
  inputs are arguments of that function, and the outputs its results. All of it may be JSON text (DeepCoder, TACO, APPS).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rlhfless_ray.common.json_types import JsonObject

CHILD = Path(__file__).with_name("sandbox_child.py")
FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
MOST_TESTS = 32  # of a row; some data sets have hundreds, with megabytes of input
LIMIT_SHARE = 0.8  # of `reward.timeout_s` for all tests of a response: code that never ends earns 0, and is no failed sample
MEMORY_MB, FILE_MB = 1024, 16

Test = dict[str, object]


def code_of(response: str) -> str:
    """Return the last fenced block of Python, else the last fenced block, else the whole response."""
    blocks = FENCE.findall(response)
    python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [text for _, text in blocks] or [response])[-1]


def row_tests(row: JsonObject, column: str) -> list[Test]:
    """Return a row's tests, see the head of this module. Raises ValueError for a column in none of these forms."""
    tests = row[column]
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        try:
            tests = json.loads(tests)
        except ValueError:
            raise ValueError(f"column `{column}` is not valid JSON") from None
    if isinstance(tests, str):
        call = f"\ncheck({row['entry_point']})" if row.get("entry_point") else ""
        tests = [tests + call]
    if isinstance(tests, dict) and isinstance(tests.get("inputs"), list) and isinstance(tests.get("outputs"), list):
        name = {"fn_name": tests["fn_name"]} if tests.get("fn_name") else {}
        tests = [{"input": given, "output": wanted, **name} for given, wanted in zip(tests["inputs"], tests["outputs"], strict=False)]
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"column `{column}` has no tests: expected assertions, or pairs of `input` and `output`")
    return [_test(one, column) for one in tests[:MOST_TESTS]]


def _test(one: object, column: str) -> Test:
    if isinstance(one, str) and one.strip():
        return {"assertions": one}
    if isinstance(one, dict) and "input" in one and "output" in one:
        return {"input": one["input"], "output": one["output"], "fn_name": one.get("fn_name") or ""}
    raise ValueError(f"column `{column}` has a test that is neither an assertion nor a pair of `input` and `output`: {str(one)[:80]!r}")


def code_reward(prompt: str, response: str, row: JsonObject, *, tests_column: str, limit_s: float) -> float:
    """Return 1 if the response's code passes all tests within `limit_s` seconds, else 0. Raises ValueError for a row without tests."""
    tests = row_tests(row, tests_column)
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return float(passes(f"{setup}\n{code_of(response)}" if setup else code_of(response), tests, limit_s))


def passes(code: str, tests: list[Test], limit_s: float) -> bool:
    """Run the tests in a sandbox, one after the other until one fails."""
    job = {"code": code, "tests": tests, "limit_s": limit_s, "memory_bytes": MEMORY_MB << 20, "file_bytes": FILE_MB << 20}
    with tempfile.TemporaryDirectory(prefix="rlhfless-code-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(json.dumps(job).encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return False
        finally:  # also if the scoring process interrupts this call
            _end(child)
    return said.strip() == b"passed"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the sandbox with all processes of its session."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
