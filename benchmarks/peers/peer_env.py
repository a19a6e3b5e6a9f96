"""A virtual environment with verl and OpenRLHF on top of this interpreter's packages, made beside the benchmark."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINNED = HERE / "peer_requirements.txt"
FOLDER = HERE / ".env-peers"


def peer_python() -> Path:
    """The environment's interpreter. Makes the environment when there is none or the pinned list has changed.

    Nothing is resolved: both libraries would pull other builds of torch and vLLM than those that are measured here.
    """
    python = FOLDER / "bin" / "python"
    mark = FOLDER / "installed"
    below = sysconfig.get_path("purelib")
    wanted = hashlib.sha256(PINNED.read_bytes() + below.encode()).hexdigest()
    if mark.is_file() and mark.read_text() == wanted and python.exists():
        return python
    print("making the environment for verl and OpenRLHF (once, under a minute)", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    subprocess.run([python, "-m", "pip", "install", "-qq", "--no-deps", "-r", PINNED], check=True)
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (Path(own) / "zz_project.pth").write_text(below + "\n")  # searched last
    mark.write_text(wanted)
    return python
