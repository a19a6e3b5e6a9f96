"""TRL's own virtual environment, beside the benchmark and made by it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINNED = HERE / "trl_requirements.txt"
FOLDER = HERE / ".env-trl"


def trl_python() -> Path:
    """The environment's interpreter. Makes the environment when there is none or the pinned list has changed.

    The list is complete and installed without resolving: a resolver would pull a CUDA build of torch where there is one.
    """
    python = FOLDER / "bin" / "python"
    mark = FOLDER / "installed"
    wanted = hashlib.sha256(PINNED.read_bytes()).hexdigest()
    if mark.is_file() and mark.read_text() == wanted and python.exists():
        return python
    print("making the environment for TRL (once, about 2 minutes)", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    subprocess.run([python, "-m", "pip", "install", "-qq", "--no-deps", "-r", PINNED], check=True)
    subprocess.run([python, "-c", "from trl import GRPOConfig, GRPOTrainer"], check=True)
    mark.write_text(wanted)
    return python
