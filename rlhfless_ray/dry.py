"""A user's file is tried before the first step, in a process of its own: one that hangs or ends it takes nothing with it, and what it
started ends with it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfless_ray.errors import UserError

START_S = 120.0  # for the process and what the user's file imports


def answer_of(module: str, given: Any, work_s: float, where: str, what: str, ends: str) -> Any:
    """What `module`, run as a program, makes of `given` (see `answer`) within START_S + `work_s`. Raises UserError, which begins with
    `where`, when it hangs or ends without an answer; `what` and `ends`: noun and verb of that sentence."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    limit_s = START_S + work_s
    with tempfile.TemporaryDirectory(prefix="rlhfless-dry-") as folder:
        told, said = Path(folder) / "answer", Path(folder) / "said"
        with said.open("wb") as errors:  # a file and no pipe: processes that the user's file starts and leaves would keep it open
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(told)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )
        try:
            process.communicate(pickle.dumps(given), timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise UserError(f"{where}: {what} did not {ends} within {limit_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not told.is_file():
            last = (said.read_text("utf-8", "replace").strip().splitlines() or [""])[-1][:300]
            raise UserError(f"{where}: its process ended with code {process.returncode} in {what}" + (f": {last}" if last else ""))
        return pickle.loads(told.read_bytes())


def answer(function: Callable[..., Any]) -> None:
    """The other end: the whole program of such a process."""
    made = function(*pickle.loads(sys.stdin.buffer.read()))
    temporary = Path(sys.argv[1] + ".part")
    temporary.write_bytes(pickle.dumps(made))
    temporary.rename(sys.argv[1])
