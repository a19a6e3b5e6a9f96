from __future__ import annotations

import subprocess
import sys


def test_the_planner_is_pure_python_and_numpy() -> None:
    script = (
        "import sys, placement.lengths, placement.policy, placement.speed\n"
        "print([m for m in ('ray', 'torch', 'rlhfless_ray', 'vllm', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
