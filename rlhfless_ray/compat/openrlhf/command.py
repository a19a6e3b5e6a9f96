"""Find OpenRLHF's launcher in a whole command, and replace it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.common.ray_environment import PACKAGES
from rlhfless_ray.compat.openrlhf.elastic_flags import take_options
from rlhfless_ray.compat.openrlhf.flags import LAUNCHER
from rlhfless_ray.compat.openrlhf.inference_table import LAUNCHERS
from rlhfless_ray.compat.openrlhf.shim.rlhfless_explain import MODULE_FLAGS, MOLT, SHELLS, find_launcher, is_script
from rlhfless_ray.compat.openrlhf.starters import STARTERS, ranks_before
from rlhfless_ray.compat.openrlhf.supervised_table import TASKS

TRANSLATED = (LAUNCHER, *TASKS, *LAUNCHERS, MOLT)
"""Launchers that train or generate, whose command lines become recipes."""
OURS = (*TRANSLATED, "serve_rm", "lora_combiner")
"""Launchers with a module of the same name in rlhfless_ray.cli."""


@dataclass
class LaunchCommand:
    launcher: str
    flags: list[str]
    """The launcher's own command line."""
    is_away: bool = False
    """Whether it is a job for another machine."""
    folder: str = "."
    script: str = ""
    line: int = 1
    """The command's first line in the script that starts it."""


def launch_in(argv: Sequence[str]) -> LaunchCommand | None:
    """Return the launch in a command, also after `ray job submit … --` or `srun`. None if a script starts it, or nothing does.

    Flags alone belong to the PPO launcher.
    """
    if argv and argv[0].startswith("--"):
        return LaunchCommand(LAUNCHER, list(argv))
    if (found := find_launcher(argv)) is None:
        return None
    place, launcher = found
    return LaunchCommand(launcher, [*_ranks(launcher, argv[:place]), *argv[place + 1 :]], is_submission(argv))


def check_starts_shell(argv: Sequence[str]) -> None:
    """Raise UserError if a command without a launcher runs no shell either, or a script that does not exist."""
    scripts = [word for before, word in pairwise(["", *argv]) if is_script(word, before) and not re.search(r"\s", word)]
    if missing := [script for script in scripts if not (Path(script).exists() or is_submission(argv))]:
        raise UserError(f"{missing[0]}: no such file")
    if other := next((found[0] for word in argv if (found := re.fullmatch(r"molt\.cli\.\w+", word))), None):
        raise UserError(f"{other}: of Molt's launchers only molt.cli.{MOLT} is read")
    if not scripts and not any(Path(before).name in SHELLS for before, _ in pairwise(argv)):
        command = f"python3 -m openrlhf.cli.{LAUNCHER} …"
        raise UserError(f"`{shlex.join(argv)[:80]}`: no launcher of OpenRLHF in it; give a command such as {command}")


# ---------------------------------------------------------------- running it


def replaced(argv: Sequence[str]) -> list[str]:
    """Replace OpenRLHF's launchers in a command with this project's. A bare `python` that starts one becomes this interpreter."""
    found = find_launcher(argv)
    if found is None or found[1] not in OURS:
        return [_with_own_launchers(word) if re.search(r"\s", word) else word for word in argv]
    place, launcher = found
    before, own = list(argv[:place]), f"rlhfless_ray.cli.{launcher}"
    if Path(argv[0]).name in STARTERS:
        return [sys.executable, "-m", own, *_ranks(launcher, before), *argv[place + 1 :]]
    if re.fullmatch(r"python[\d.]*", argv[0]):
        before[0] = sys.executable
    return [*before, *([] if before[-1] in MODULE_FLAGS else ["-m"]), own, *argv[place + 1 :]]


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


def _take_runtime_env(options: list[str]) -> tuple[list[str], JsonObject]:
    """Return the options without --runtime-env-json and --runtime-env, and the content of these two."""
    kept, given = take_options(options, lambda name: name in ("--runtime-env-json", "--runtime-env"))
    runtime_env: JsonObject = {}
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
