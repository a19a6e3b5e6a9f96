"""Run random cases in gangs of one and two ranks, and compare what they found with float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.learn.conftest import joined, run_gangs

NEAR = 1e-4  # a case with a number so near to a bound may differ: float32 may be on its other side
CLOSE = 5e-5  # relative error of float32: 3e-5 is the largest of 360 cases, and it differs between runs
FLOAT32 = float(np.finfo(np.float32).eps) / 2


def is_close(found: float, wanted: float) -> bool:
    """Return whether a statistic is right up to float32. Log-probabilities have an absolute error of some 4e-6."""
    return bool(np.isclose(found, wanted, rtol=3 * CLOSE, atol=CLOSE / 5))


def weight_differences(found: dict[str, np.ndarray], wanted: dict[str, Tensor], before: dict[str, Tensor]) -> list[str]:
    """Compare weights by their distance in units of the largest change since the start, beyond the rounding of the weights themselves."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    moved = max(1e-12, *(float((wanted[name].detach() - before[name]).abs().max()) for name in wanted))  # 0 at a learning rate of 0
    apart = {}
    for name, weight in wanted.items():
        weight = weight.detach()
        distance = (torch.from_numpy(found[name]).double() - weight).abs() - 4 * FLOAT32 * weight.abs()
        apart[name] = float(distance.max()) / moved
    worst = max(apart, key=lambda name: apart[name])
    return [f"{worst} is off by {apart[worst]:.1e} of the largest change"] if apart[worst] > CLOSE else []


def check(folder: Path, cases: dict[str, Any], compare: Callable[[Any, dict[str, Any]], tuple[list[str], float]]) -> None:
    """Run the cases in gangs of one and two ranks, and compare each with its reference."""
    jobs: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for name, case in cases.items():
        jobs[case.settings.learner.ranks][name] = {**vars(case), "files": case.files}
    results = run_gangs(folder, jobs)
    wrong, near = dict[str, list[str]](), 0
    for name, case in cases.items():
        errors, margin = compare(case, joined(results[case.settings.learner.ranks], name))
        if errors and margin < NEAR:
            near += 1
        elif errors:
            wrong[name] = errors
    said = "\n".join(f"{name}: {'; '.join(errors[:4])}" for name, errors in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ from float64:\n{said}"
    assert near <= max(1, len(cases) // 10), f"{near} of {len(cases)} cases are too near to a bound to tell"
