"""Run a launch script whose launchers are recorded instead of started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.command import LaunchCommand, launch_in, shim_folder, with_shim
from rlhfless_ray.compat.openrlhf.shim import rlhfless_explain
from rlhfless_ray.compat.openrlhf.shim.rlhfless_explain import AWAY, FOLDER, LOST, NAMES, PLACE, RECORDS, SCRIPT_ENDINGS
from rlhfless_ray.local.watcher import Watcher

DEADLINE_S = 120.0  # of a script; a longer one probably waits for what is not started
LEFT_S = 5.0  # for processes that the script left in the background
END_S = 2.0  # from SIGTERM to SIGKILL

BASH_ENV = f"""
[ -z "${{RLHFLESS_BASH_ENV-}}" ] || . "$RLHFLESS_BASH_ENV"
[ "${{BASH_VERSINFO[0]}}" -lt 5 ] || exec {{BASH_XTRACEFD}}>/dev/null # the trap below would be in the trace of each command
[ -z "${{{AWAY}-}}" ] || cd() {{ builtin cd "$@" 2>/dev/null || echo "cd $*: no such folder on this machine" >&2; }}
command_not_found_handle() {{
  echo "${{BASH_SOURCE[1]-bash}}: line ${{BASH_LINENO[0]}}: $1: command not found" >&2
  case $1 in -*) "${FOLDER}/bin/{LOST}" "${{BASH_SOURCE[1]-}}:${{BASH_LINENO[0]}}" "$@" ;; esac
  return 127
}}
set -T
trap 'RLHFLESS_LAST=$_ {PLACE}=${{BASH_SOURCE-}}:$LINENO RLHFLESS_WORD=${{BASH_COMMAND%% *}}
  case $RLHFLESS_WORD in
    *[!A-Za-z0-9_./-]*) ;;
    /*/*) [ -e "$RLHFLESS_WORD" ] || [ ! -e "${FOLDER}/bin/${{RLHFLESS_WORD##*/}}" ] ||
      eval "function $RLHFLESS_WORD {{ ${{RLHFLESS_WORD##*/}} \\"\\$@\\"; }}" ;;
  esac
  case ${{PATH-}}: in ${FOLDER}/bin:*) ;; *) PATH=${FOLDER}/bin:${{PATH-}} ;; esac
  case ${{PYTHONPATH-}}: in $RLHFLESS_SHIM:*) ;; *) PYTHONPATH=$RLHFLESS_SHIM${{PYTHONPATH:+:$PYTHONPATH}} ;; esac
  export PATH PYTHONPATH {PLACE}
  : "$RLHFLESS_LAST"' DEBUG
"""
"""What each bash of the script reads first. A script that sets PATH or PYTHONPATH anew still finds the programs that stand in."""


@dataclass
class ScriptRun:
    launches: list[LaunchCommand] = field(default_factory=list)
    """Different launches in their order."""
    lost: list[str] = field(default_factory=list)
    """Sentences about flags that bash took for commands of their own."""
    notes: list[str] = field(default_factory=list)
    is_complete: bool = True


def run_script(argv: Sequence[str], deadline_s: float = DEADLINE_S) -> ScriptRun:
    """Run a command in its usual working folder, with its output on stderr. At the end nothing that it started is left running."""
    words = ["bash", *argv] if argv[0].endswith(SCRIPT_ENDINGS) and not os.access(argv[0], os.X_OK) else list(argv)
    found, command = ScriptRun(), f"`{shlex.join(argv)[:80]}`"
    with TemporaryDirectory(prefix="rlhfless-explain-") as name:
        folder = Path(name)
        environment = _prepare(folder)
        try:
            process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        except OSError as error:
            raise UserError(f"`{words[0]}`: {error.strerror}") from None
        watcher = Watcher(folder)
        watcher.add_session(process.pid)
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that `finally` runs
        try:
            if code := process.wait(deadline_s):
                found.notes.append(f"{command} ended with exit code {code}; what it would do after that is not read")
        except subprocess.TimeoutExpired:
            found.is_complete = False
            found.notes.append(f"{command} still ran after {deadline_s:g} s and was ended; what it would do after that is not read")
        finally:
            ended = _end_rest(folder, process.pid, 0.0 if process.poll() is None else LEFT_S)
            process.wait()
            watcher.close()
            signal.signal(signal.SIGTERM, before)
        if ended:
            found.notes.append(f"processes that {command} left running were ended: {', '.join(ended)}")
        _read_records(folder / RECORDS, found)
    return found


def _prepare(folder: Path) -> dict[str, str]:
    """Write the programs that stand in. Returns the script's environment."""
    (folder / "bin").mkdir()
    for name in (*NAMES, LOST):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(rlhfless_explain.__file__)} {name} "$@"\n')
        program.chmod(0o755)
    (folder / "bash_env").write_text(BASH_ENV)
    return {
        **with_shim(dict(os.environ)),
        FOLDER: str(folder),
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "RLHFLESS_SHIM": str(shim_folder()),
        "RLHFLESS_BASH_ENV": os.environ.get("BASH_ENV", ""),
        "BASH_ENV": str(folder / "bash_env"),
    }


def _running(folder: Path, session: int) -> Iterator[psutil.Process]:
    """Yield the processes of the script, also those in sessions of their own."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_own = os.getsid(process.pid) == session or process.environ().get(FOLDER) == str(folder)
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _end_rest(folder: Path, session: int, patience_s: float) -> list[str]:
    """End what still runs after some patience: a launcher may be about to start. Returns the commands that were ended."""
    ended: dict[int, str] = {}
    for end, wait_s in ((psutil.Process.is_running, patience_s), (psutil.Process.terminate, END_S), (psutil.Process.kill, END_S)):
        processes = list(_running(folder, session))
        for process in processes:
            with suppress(psutil.Error):
                if end is not psutil.Process.is_running:
                    ended.setdefault(process.pid, shlex.join(process.cmdline())[:80])
                end(process)
        psutil.wait_procs(processes, timeout=wait_s)
    return list(ended.values())


def _read_records(file: Path, found: ScriptRun) -> None:
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        entry = json.loads(line)
        place, _, number = entry["place"].rpartition(":")
        first = int(number or 0)
        if "lost" in entry:
            found.lost.append(
                f"{place} line {first}: bash takes `{shlex.join(entry['lost'])}` for a command, because the line before does not go on"
            )
            continue
        launch = launch_in(entry["words"])
        assert launch is not None
        launch.script, launch.line, launch.is_away = str(Path(place).absolute()), first, entry["away"] or launch.is_away
        launch.folder = entry["folder"] if Path(entry["folder"]).is_dir() else "."
        if not any((launch.launcher, launch.flags) == (other.launcher, other.flags) for other in found.launches):
            found.launches.append(launch)
