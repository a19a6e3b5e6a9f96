"""Stand in for the programs that a script starts while `rlhfless explain` runs it.

Launchers are recorded and not started. Ray, Slurm, containers and other machines are left alone. Every other program runs as itself.
The interpreter may be any of Python 3.10 or newer, so this module imports only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

FOLDER = "RLHFLESS_EXPLAIN"  # environment variable: the folder of the programs that stand in, and of what they record
PLACE = "RLHFLESS_EXPLAIN_PLACE"  # file:line of the script's current command
AWAY = "RLHFLESS_EXPLAIN_AWAY"  # set within a command that is meant for another machine
RECORDS = "records.jsonl"
MOLT = "train_rl_ray"
MODULE = re.compile(rf"(?:(?:openrlhf|rlhfless_ray)\.cli\.|molt\.cli\.(?={MOLT}\b))(\w+)")
UNREAD = re.compile(r"(?:-m)?molt\.cli\.\w+")  # another launcher of Molt's
FILE = re.compile(r"(?:\S*/)?(?:openrlhf|rlhfless_ray)/cli/(\w+)\.py")
INSIDE = re.compile(rf"{MODULE.pattern}|{FILE.pattern}")
MODULE_FLAGS = ("-m", "--module")
SHELLS = ("bash", "sh")
SCRIPT_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch")
STARTERS = ("python", "python3", "deepspeed", "torchrun", "accelerate", "mpirun", "mpiexec")
ELSEWHERE = ("srun", "docker", "podman", "apptainer", "singularity", "enroot", "kubectl", "ssh")
"""Programs whose command runs in a container or on another machine."""
INSTALLERS = ("pip", "pip3", "apt", "apt-get")
NAMES = (*STARTERS, *ELSEWHERE, *INSTALLERS, "ray", "rlhfless", "sbatch", "scontrol", "sudo")
LOST = "lost"
"""Name under which `main` records flags that bash took for a command."""
SUBMITTED = "Job 'raysubmit_explained' submitted successfully"


def find_launcher(words: Sequence[str]) -> tuple[int, str] | None:
    """Return the place and the name of the first launcher in a command. None if there is none, or if it follows a shell's script."""
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        module = MODULE.fullmatch(word.removeprefix("-m")) if before in MODULE_FLAGS or word.startswith("-m") else None
        if found := module or FILE.fullmatch(word):
            return place, found[1]
        if is_script(word, before):
            return None
    return None


def is_script(word: str, before: str) -> bool:
    """Return whether a word of a command names a shell script. `before`: the word before it."""
    return word.endswith(SCRIPT_ENDINGS) or (Path(before).name in SHELLS and not word.startswith("-"))


def stand_in(words: list[str]) -> int | None:
    """Handle a command of the script. Returns the exit code, or None if the program itself is to run."""
    name, found = Path(words[0]).name, find_launcher(words)
    if name == "ray":
        _enter_working_folder(words)
    if found is not None and words[found[0] + 1 : found[0] + 2] not in (["--help"], ["-h"]):
        record({"words": words, "folder": os.getcwd(), "place": os.environ.get(PLACE, ""), "away": AWAY in os.environ})
        print(f"[rlhfless] recorded, not started: {found[1]}", file=sys.stderr)
        if name == "ray":
            print(SUBMITTED)
        return 0
    if name == "ray":
        return _ray(words)
    if name == "scontrol":
        print("localhost")
        return 0
    if name == "sbatch":
        print("Submitted batch job 1", flush=True)
        os.dup2(2, 1)  # a job's output goes into a file of its own
    installs = name in INSTALLERS or words[1:3] == ["-m", "pip"]
    if name in ("sbatch", *ELSEWHERE) or (installs and AWAY in os.environ):
        return _run_away(_inner(words), words)
    if name == "sudo" and (inner := _inner(words)):
        os.execvp(inner[0], inner)
    return _leave_alone(words) if name == "rlhfless" or any(UNREAD.fullmatch(word) for word in words) else None


def record(entry: dict[str, object]) -> None:
    with open(Path(os.environ[FOLDER]) / RECORDS, "ab", buffering=0) as file:  # one write for each line, of several processes at once
        file.write(json.dumps(entry).encode() + b"\n")


def _leave_alone(words: Sequence[str]) -> int:
    print(f"[rlhfless] not run: {shlex.join(words)[:200]}", file=sys.stderr)
    return 0


def _ray(words: list[str]) -> int:
    """Print what a script may read of a job. Run the shell script of a job that has one."""
    if words[1:3] == ["job", "status"]:
        print(f"Job '{words[-1]}' succeeded\nStatus message: SUCCEEDED")
    if words[1:3] != ["job", "submit"] or "--" not in words:
        return _leave_alone(words)
    print(SUBMITTED, flush=True)
    return _run_away(_inner(["", *words[words.index("--") + 1 :]]), words)


def _enter_working_folder(words: Sequence[str]) -> None:
    """Enter the working folder of a job if it is on this machine."""
    for option, value in pairwise(words):
        name, _, given = option.partition("=")
        if name == "--working-dir" and os.path.isdir(given or value):
            os.chdir(given or value)


def _inner(words: list[str]) -> list[str]:
    """Return the shell command or the script that a command starts elsewhere. Empty if it starts neither."""
    for place, word in enumerate(words[1:], start=1):
        option, _, text = word.partition("=")
        if option == "--wrap":
            return ["bash", "-c", text or words[place + 1]]
        if word.endswith(SCRIPT_ENDINGS) or (Path(words[0]).name == "sbatch" and os.path.isfile(word)):
            return ["bash", *words[place:]]
        if Path(word).name in SHELLS:
            return words[place:]
        if re.search(r"\s", word) and INSIDE.search(word):
            return ["bash", "-c", word]
    return ["bash", "-s"] if Path(words[0]).name == "sbatch" else []


def _run_away(inner: list[str], words: list[str]) -> int:
    if not inner:
        return _leave_alone(words)
    os.environ[AWAY] = "1"
    os.execvp(inner[0], inner)


def stand_in_for_python() -> None:
    """End this interpreter if it was started for a launcher, or for a program that is left alone."""
    is_program = Path("".join(sys.orig_argv[1:2])).name in NAMES  # written in Python, such as /opt/venv/bin/ray
    if (code := stand_in(sys.orig_argv[is_program:])) is not None:
        sys.stdout.flush()
        os._exit(code)


def main(words: list[str]) -> int:
    """Stand in for the program `words[0]`, which the script found on PATH."""
    if words[0] == LOST:
        record({"lost": words[2:], "place": words[1]})
        return 0
    if (code := stand_in(words)) is not None:
        return code
    stands = os.path.join(os.environ[FOLDER], "bin")
    path = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if folder != stands)
    program = shutil.which(words[0], path=path)
    if program is None:
        print(f"{words[0]}: command not found", file=sys.stderr)
        return 127
    os.execv(program, [program, *words[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
