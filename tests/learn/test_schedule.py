"""Every schedule against transformers' own, step by step and beyond the end."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from rlhfless_ray.learn.schedule import rate
from rlhfless_ray.recipe.section import ScheduleName


@pytest.mark.parametrize("warmup_share", [0.0, 0.03, 0.5])
@pytest.mark.parametrize("name", ScheduleName.__args__)
def test_every_step_has_the_rate_that_transformers_gives_it(name: str, warmup_share: float) -> None:
    total, peak = 40, 3e-4
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    special = {"min_lr": 0.1 * peak} if name == "cosine_with_min_lr" else {}
    warmup = math.ceil(total * warmup_share)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=special)
    for step in range(total + 5):
        assert rate(name, step, total, peak, warmup_share, 0.1) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12, abs=1e-15), step
        optimizer.step()
        schedule.step()
