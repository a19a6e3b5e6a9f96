"""How many devices a simulated step holds."""

from __future__ import annotations

import numpy as np

from placement.simulate.simulate_step import StepRun


def most_devices(step: StepRun) -> int:
    """Return the largest number of devices held at once."""
    edges = sorted([(round(h.from_s, 9), h.devices) for h in step.holds] + [(round(h.to_s, 9), -h.devices) for h in step.holds])
    return int(max(np.cumsum([devices for _, devices in edges]), default=0))
