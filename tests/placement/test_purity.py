from __future__ import annotations

import subprocess
import sys


def test_the_planner_and_the_simulator_are_pure_python_and_numpy() -> None:
    """No runtime, no torch; and PyYAML only once a data file is read."""
    script = (
        "import sys, placement.forecast.forecaster, placement.scaling.resize_policy, placement.speed.roofline\n"
        "import placement.simulate, placement.speed.decode_speed\n"
        "print([m for m in ('ray', 'torch', 'rlhfless_ray', 'vllm', 'pydantic', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
