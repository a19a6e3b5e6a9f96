"""Install the built wheel in an empty environment and learn with it: `python -m benchmarks.fresh_wheel [--python PYTHON] [--uv UV]`.

No file of the repository is used after the wheel is built: the commands of docs/install.md install it, and the script below runs in
an empty folder. Prints seconds for each part, and the mean reward of the first and the last five steps. The exit code is 1 if a part
fails or the policy did not learn. Downloads 0.6 GB where the index has PyTorch's CPU build, 4 GB elsewhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlhfless_ray.common.vllm_install import ENGINE_ON_CPU

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = '''\
from rlhfless_ray import train

run = train(
    prompts="chain", reward="task", **{"policy.hidden_size": 128}, warm_start={"steps": 1000, "batch_size": 32},
    rollout={"samples_per_prompt": 8, "max_tokens": 160}, learner={"learning_rate": 3e-4}, run={"steps": 40},
)
rewards = [row["reward/mean"] for row in run.metrics if "reward/mean" in row]  # evaluations have rows too
first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
print(f"mean reward {first:.3f} -> {last:.3f}")
raise SystemExit(last < first + 0.05)
'''  # fmt: skip
RUN_S, INSTALL_S = 900, 3000  # deadlines


def run_timed(name: str, command: list[str], folder: Path, deadline_s: int) -> None:
    """Run a command and print its seconds. Raises CalledProcessError or TimeoutExpired."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    start = time.monotonic()
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=deadline_s)
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the new environment")
    parser.add_argument("--uv", default="", help="a `uv` to install with, instead of pip")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhfless-wheel-") as scratch:
        folder, python = Path(scratch), str(Path(scratch, "venv", "bin", "python"))
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        run_timed("build the wheel", build, folder, INSTALL_S)
        run_timed("make an environment", [arguments.python, "-m", "venv", "venv"], folder, INSTALL_S)
        pip = [arguments.uv, "pip", "install", "--python", python] if arguments.uv else [python, "-m", "pip", "install"]
        wheel = next(folder.glob("*.whl"))
        run_timed("install", [*pip, "--quiet", f"{wheel}[cpu]"], folder, INSTALL_S)
        run_timed("install the engine", [*pip, "--quiet", "--no-deps", ENGINE_ON_CPU], folder, INSTALL_S)
        (folder / "empty").mkdir()
        (folder / "empty" / "learn.py").write_text(SCRIPT)
        run_timed("learn", [python, "learn.py"], folder / "empty", RUN_S)


if __name__ == "__main__":
    main()
