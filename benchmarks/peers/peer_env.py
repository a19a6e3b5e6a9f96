"""Virtual environments with another library on top of this interpreter's packages, made beside the benchmark."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINNED = HERE / "peer_requirements.txt"
FOLDER = HERE / ".env-peers"


def peer_python() -> Path:
    """Return the interpreter of the environment with verl and OpenRLHF, whose functions are compared."""
    return layered_python(FOLDER, PINNED, "verl and OpenRLHF")


def layered_python(folder: Path, pinned: Path, what: str, change: Callable[[Path], None] | None = None, version: str = "") -> Path:
    """Return an environment's interpreter. Makes the environment if there is none, or if the pinned list or `version` has changed.

    Nothing is resolved: the libraries would pull other builds of torch and vLLM than those that are measured here. `change` is called
    with the folder of the installed packages.
    """
    python = folder / "bin" / "python"
    mark = folder / "installed"
    below = sysconfig.get_path("purelib")
    wanted = hashlib.sha256(pinned.read_bytes() + below.encode() + version.encode()).hexdigest()
    if mark.is_file() and mark.read_text() == wanted and python.exists():
        return python
    print(f"making the environment for {what} (once, under a minute)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-qq", "--no-deps", "-r", pinned], check=True)
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (Path(own) / "zz_project.pth").write_text(below + "\n")  # searched last
    if change is not None:
        change(Path(own))
    mark.write_text(wanted)
    return python
