"""Virtual environments with other libraries, made beside the benchmark."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def trl_python() -> Path:
    """Return the interpreter of TRL's environment, which shares no package with this one."""
    return pinned_python(HERE / ".env-trl", HERE / "trl_requirements.txt", "TRL")


def peer_python() -> Path:
    """Return the interpreter of the environment with verl and OpenRLHF, whose functions are compared."""
    return layered_python(HERE / ".env-peers", HERE / "peer_requirements.txt", "verl and OpenRLHF")


def layered_python(folder: Path, pinned: Path, what: str, change: Callable[[Path], None] | None = None, version: str = "") -> Path:
    """Return the interpreter of an environment on top of this interpreter's packages; see `pinned_python`.

    `change` is called with the folder of the installed packages.
    """
    below = sysconfig.get_path("purelib")

    def finish(packages: Path) -> None:
        (packages / "zz_project.pth").write_text(below + "\n")  # searched last
        if change is not None:
            change(packages)

    return pinned_python(folder, pinned, what, finish, below + version)


def pinned_python(folder: Path, pinned: Path, what: str, finish: Callable[[Path], None] | None = None, version: str = "") -> Path:
    """Return an environment's interpreter. Makes the environment if there is none, or if the pinned list or `version` has changed.

    Nothing is resolved: the libraries would pull other builds of torch and vLLM than those that are measured here. `finish` is called
    with the folder of the installed packages.
    """
    python = folder / "bin" / "python"
    mark = folder / "installed"
    wanted = hashlib.sha256(pinned.read_bytes() + version.encode()).hexdigest()
    if mark.is_file() and mark.read_text() == wanted and python.exists():
        return python
    print(f"making the environment for {what} (once, up to 2 minutes)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-qq", "--no-deps", "-r", pinned], check=True)
    if finish is not None:
        finish(Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)})))
    mark.write_text(wanted)
    return python
