"""Find OpenRLHF's launcher in a whole command, and replace it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.ray_environment import PACKAGES
from rlhfless_ray.compat.openrlhf.elastic_flags import take_options
from rlhfless_ray.compat.openrlhf.flags import LAUNCHER
from rlhfless_ray.compat.openrlhf.inference_table import LAUNCHERS
from rlhfless_ray.compat.openrlhf.shell import simple_commands
from rlhfless_ray.compat.openrlhf.starters import STARTERS, ranks_before
from rlhfless_ray.compat.openrlhf.supervised_table import TASKS

MOLT = "train_rl_ray"
TRANSLATED = (LAUNCHER, *TASKS, *LAUNCHERS, MOLT)
"""Launchers that train or generate, whose command lines become recipes."""
OURS = (*TRANSLATED, "serve_rm", "lora_combiner")
"""Launchers with a module of the same name in rlhfless_ray.cli."""
MODULE = re.compile(rf"(?:(?:openrlhf|rlhfless_ray)\.cli\.|molt\.cli\.(?={MOLT}\b))(\w+)")
FILE = re.compile(r"(?:\S*/)?(?:openrlhf|rlhfless_ray)/cli/(\w+)\.py")
INSIDE = re.compile(rf"{MODULE.pattern}|{FILE.pattern}")
MODULE_FLAGS = ("-m", "--module")
MAX_SHELLS = 10  # of shells that start shells; a word that cannot be expanded may hold itself
PRINTS = ("echo", "printf", "[", "[[", "test")


@dataclass
class LaunchCommand:
    launcher: str
    flags: list[str]
    """The launcher's own command line."""


def find_all(argv: Sequence[str]) -> list[LaunchCommand]:
    """Find the launchers in a command, after `ray job submit … --` or `srun`, in `bash -c '…'`, or in a script that the command runs.

    Of a script with several, PPO's comes first, and those that neither train nor generate come last. Flags alone belong to the PPO
    launcher. Raises UserError if there is no launcher.
    """
    if argv and argv[0].startswith("--"):
        return [LaunchCommand(LAUNCHER, list(argv))]
    launches = _locate(list(argv))
    if not launches:
        scripts = [token for before, token in pairwise(["", *argv]) if _is_script(token, before)]
        if missing := [script for script in scripts if not Path(script).exists()]:
            raise UserError(f"{missing[0]}: no such file")
        if other := next((found[0] for token in argv if (found := re.search(r"\bmolt\.cli\.\w+", token))), None):
            raise UserError(f"{other}: of Molt's launchers only molt.cli.{MOLT} is read")
        raise UserError(
            f"`{' '.join(argv)[:80]}`: no launcher of OpenRLHF in it; give a command such as python3 -m openrlhf.cli.{LAUNCHER} …"
        )
    return sorted(launches, key=_priority)


def _priority(launch: LaunchCommand) -> int:
    return 0 if launch.launcher == LAUNCHER else 1 if launch.launcher in TRANSLATED else 2


def _is_script(token: str, before: str) -> bool:
    """Return whether a word of a command names a shell script. `before`: the word before it."""
    return token.endswith((".sh", ".bash", ".slurm", ".sbatch")) or (Path(before).name in ("bash", "sh") and not token.startswith("-"))


def _locate(argv: list[str], environment: Mapping[str, str] = os.environ, depth: int = 0) -> list[LaunchCommand]:
    if depth > MAX_SHELLS:
        return []
    for index, token in enumerate(argv):
        before = argv[index - 1] if index else ""
        module = MODULE.fullmatch(token.removeprefix("-m")) if before in MODULE_FLAGS or token.startswith("-m") else None
        here = module or FILE.fullmatch(token)
        if here:
            return [LaunchCommand(here[1], [*_ranks(here[1], argv[:index]), *argv[index + 1 :]])]
        if " " in token or "\n" in token:
            is_text = before.startswith("-") and before.endswith("c") and index > 1 and Path(argv[index - 2]).name in ("bash", "sh")
            # the commands of a substitution are read on their own; a text of bash may start a script
            if (is_text or INSIDE.search(token)) and token[0] not in "$`":
                arguments = argv[index + 2 :] if before.startswith("-") and before.endswith("c") else None
                return _in_shell(token, environment, arguments, depth)
        elif _is_script(token, before) and Path(token).is_file():
            return _in_shell(Path(token).read_text(encoding="utf-8", errors="replace"), environment, argv[index + 1 :], depth)
    return []


def _in_shell(text: str, environment: Mapping[str, str], arguments: list[str] | None, depth: int) -> list[LaunchCommand]:
    """Return the different launches of a script. One that is only printed or asked for help counts if there is no other."""
    launches: list[tuple[bool, LaunchCommand]] = []
    for words, handed in simple_commands(text, environment, arguments):
        for launch in _locate(words, handed, depth + 1):
            is_run = words[0] not in PRINTS and launch.flags[:1] not in (["--help"], ["-h"])
            if (is_run, launch) not in launches:
                launches.append((is_run, launch))
    return [launch for is_run, launch in launches if is_run] or [launch for _, launch in launches]


# ---------------------------------------------------------------- running it


def replaced(argv: Sequence[str]) -> list[str]:
    """Replace OpenRLHF's launchers in a command with this project's. A bare `python` that starts one becomes this interpreter."""
    done: list[str] = []
    for index, token in enumerate(argv):
        before, file = argv[index - 1] if index else "", FILE.fullmatch(token)
        if before in MODULE_FLAGS and MODULE.fullmatch(token):
            done.append(_with_own_launchers(token))
        elif token.startswith("-m") and MODULE.fullmatch(token[2:]):
            done += ["-m", _with_own_launchers(token[2:])]
        elif file and file[1] in OURS:
            done += ["-m", f"rlhfless_ray.cli.{file[1]}"]
        elif (" " in token or "\n" in token) and INSIDE.search(token):
            done.append(_with_own_launchers(token))
            continue
        else:
            done.append(token)
            continue
        if Path(done[0]).name in STARTERS:
            own = done[-1]
            return [sys.executable, "-m", own, *_ranks(own.rpartition(".")[2], argv[:index]), *argv[index + 1 :]]
        if re.fullmatch(r"python[\d.]*", done[0]):
            done[0] = sys.executable
        return [*done, *argv[index + 1 :]]  # the rest are flags and their values
    return done


def _ranks(launcher: str, before: Sequence[str]) -> list[str]:
    """Return the flags for the ranks that a program before the launcher would start, if its options tell their number.

    `before`: the words of the command before the launcher.
    """
    ranks = ranks_before(before) if launcher in TASKS else None
    return [] if ranks is None else ["--elastic.learner.ranks", str(ranks)]


def _with_own_launchers(text: str) -> str:
    text = re.sub(rf"\b(?:openrlhf|molt)\.cli\.({'|'.join(OURS)})\b", r"rlhfless_ray.cli.\1", text)
    return re.sub(rf"(?<![\w./-])(?:[\w.-]*/)*openrlhf/cli/({'|'.join(OURS)})\.py", r"-m rlhfless_ray.cli.\1", text)


def shim_folder() -> Path:
    """Return the folder that makes `python -m openrlhf.cli.train_ppo_ray` run this project's launcher when on PYTHONPATH."""
    return Path(__file__).resolve().parent / "shim"


def package_root() -> Path:
    return Path(__file__).resolve().parents[3]


def with_shim(environment: dict[str, str]) -> dict[str, str]:
    old = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": ":".join([str(shim_folder()), *([old] if old else [])])}


def is_submission(argv: Sequence[str]) -> bool:
    return len(argv) > 2 and Path(argv[0]).name == "ray" and list(argv[1:3]) == ["job", "submit"] and "--" in argv


def submission(argv: Sequence[str], *, ship: bool = True) -> list[str]:
    """Return a `ray job submit … -- …` command with this project's launcher. The rest of its runtime_env is kept.

    `ship`: upload this project's packages with the job (runtime_env `py_modules`). Otherwise the cluster must have them.
    Raises UserError for another command, and for a runtime_env that cannot be read.
    """
    if not is_submission(argv):
        raise UserError("expected `ray job submit OPTIONS -- COMMAND`")
    cut = list(argv).index("--")
    options, entry = list(argv[:cut]), list(argv[cut + 1 :])
    program = entry[0] if entry else ""
    entry = replaced(entry)
    if program and entry[0] == sys.executable:
        entry[0] = "python3" if Path(program).name in STARTERS else program  # the cluster's python, not this machine's
    options, runtime_env = _take_runtime_env(options)
    if ship:
        modules = runtime_env.get("py_modules") or []
        if not isinstance(modules, list):
            raise UserError(f"--runtime-env-json: py_modules must be a list, got `{modules}`")
        runtime_env["py_modules"] = [*modules, *(str(package_root() / name) for name in PACKAGES)]
    if not any("rlhfless_ray" in token for token in entry):  # the launcher is in a script: use the cluster's own shim
        entry = ["python3", "-m", "rlhfless_ray", "run", "--", *entry]
    if runtime_env:
        options += ["--runtime-env-json", json.dumps(runtime_env)]
    return [*options, "--", *entry]


def _take_runtime_env(options: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the options without --runtime-env-json and --runtime-env, and the content of these two."""
    kept, given = take_options(options, lambda name: name in ("--runtime-env-json", "--runtime-env"))
    runtime_env: dict[str, Any] = {}
    for name, value in given:
        text = value or ""
        try:
            read = json.loads(text) if name.endswith("json") else yaml.safe_load(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{name}: cannot be read: {error}") from None
        if not isinstance(read, dict):
            raise UserError(f"{name}: expected a mapping, got `{text[:80]}`")
        runtime_env |= read
    return kept, runtime_env
