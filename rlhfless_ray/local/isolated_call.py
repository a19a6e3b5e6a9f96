"""Run a user's file once before the first step, in a process of its own.

A file that hangs or crashes ends only that process. Whatever the file started is ended with it, also processes in a session of their
own: the call is made in a child of a process that adopts all orphans below it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.local.orphans import adopt_orphans, end_below

START_S = 120.0  # limit for starting the process and for the imports of the user's file
LOOK_S = 0.1  # interval of looking at the time that a call takes
BEGUN = ".begun"  # suffix of a file whose time is that of the newest call
GROUP = ".group"  # suffix of a file with the number of the program's process and process group


def run_isolated(module: str, arguments: object, work_s: float, where: str, what: str, ends: str) -> Any:
    """Run `module` as a program that calls `isolated_main`, and return its result.

    Args:
        work_s: limit of each call before which the program calls `call_begins`. Before the first one it has START_S seconds.
        where: begins error messages.
        what, ends: noun and verb of the message for a program that hangs.

    Raises UserError if the program hangs or ends without a result.
    """
    with tempfile.TemporaryDirectory(prefix="rlhfless-dry-") as folder:
        result_path, log_path = Path(folder) / "result", Path(folder) / "stderr"
        with log_path.open("wb") as errors:  # not a pipe: processes left by the user's file would keep it open
            process = subprocess.Popen(
                forked([sys.executable, "-m", module, str(result_path)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment_with_packages(),
                start_new_session=True,
            )
        began_s, begun = time.time(), result_path.with_suffix(BEGUN)
        sent: bytes | None = pickle.dumps(arguments)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(sent, timeout=LOOK_S)
                    break
                sent = None  # `communicate` remembers it
                since_s, limit_s = (begun.stat().st_mtime, work_s) if begun.is_file() else (began_s, START_S)
                if time.time() > since_s + limit_s:
                    raise UserError(f"{where}: {what} did not {ends} within {limit_s:g} s") from None
        finally:
            group = result_path.with_suffix(GROUP)  # a forked program has another than the process that asked for the fork
            for number in {process.pid, int(group.read_text()) if group.is_file() else process.pid}:
                end_below(number)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(number, signal.SIGKILL)
            process.wait()
        if not result_path.is_file():
            last_line = (log_path.read_text("utf-8", "replace").strip().splitlines() or [""])[-1][:300]
            raise UserError(
                f"{where}: its process ended with code {process.returncode} in {what}" + (f": {last_line}" if last_line else "")
            )
        return pickle.loads(result_path.read_bytes())


def environment_with_packages() -> dict[str, str]:
    """Return the environment of a Python process that finds this project's packages."""
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])}


def call_begins() -> None:
    """Say in such a program that its limit begins now."""
    Path(sys.argv[1]).with_suffix(BEGUN).touch()


def isolated_main(function: Callable[..., object]) -> None:
    """Call `function` with the arguments that `run_isolated` passed, and return its result to that process."""
    path = Path(sys.argv[1])
    path.with_suffix(GROUP).write_text(str(os.getpgrp()))
    adopt_orphans()
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        end_below(os.getpid())
        if code < 0:
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
    result = function(*pickle.loads(sys.stdin.buffer.read()))
    temporary = path.with_suffix(".part")
    temporary.write_bytes(pickle.dumps(result))
    temporary.rename(path)
