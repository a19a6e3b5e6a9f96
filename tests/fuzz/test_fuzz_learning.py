"""Random updates, supervised stages and critics against float64: options, masks, ranks, micro-batches, ZeRO stages, gradients in the tail.

`make test` runs the seeds that together draw every option; `make test-long` many more.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.recipe.supervised_sections import SupervisedLoss
from tests.fuzz import draw_critics, draw_supervised, draw_updates, stage_cases, update_cases
from tests.fuzz.compare import check
from tests.fuzz.sections import READ, options_of

pytestmark = pytest.mark.learner

UPDATES, STAGES, CRITICS = range(200), range(120), range(40)  # seeds
BLOCKS = 4  # pairs of gangs that share them


def cases_of(updates: Iterable[int], stages: Iterable[int], critics: Iterable[int]) -> dict[str, Any]:
    return {
        **{f"update {seed}": draw_updates.draw_case(seed) for seed in updates},
        **{f"stage {seed}": draw_supervised.draw_case(seed) for seed in stages},
        **{f"critic {seed}": draw_critics.draw_case(seed) for seed in critics},
    }


def differences(case: Any, found: dict[str, Any]) -> tuple[list[str], float]:
    kinds = {
        draw_updates.UpdateCase: update_cases.differences,
        draw_supervised.SupervisedCase: stage_cases.stage_differences,
        draw_critics.CriticCase: stage_cases.critic_differences,
    }
    return kinds[type(case)](case, found)


def test_cases_of_every_option_equal_float64(tmp_path: Path, warm_processes: None) -> None:
    chosen = update_cases.covering(UPDATES), stage_cases.covering(STAGES), stage_cases.critics_covering(CRITICS)
    READ.clear()
    check(tmp_path / "gangs", cases_of(*chosen), differences)
    keys = {key for key, _ in update_cases.options_of_updates() | options_of(SupervisedLoss, "loss") | stage_cases.OF_CRITICS}
    unread = keys - READ - {"algorithm.kl.target", "algorithm.kl.horizon"}  # these change the coefficient between updates
    assert not unread, f"no reference in tests/fuzz reads {sorted(unread)}"


@pytest.mark.long
@pytest.mark.parametrize("block", range(BLOCKS))
def test_many_random_cases_equal_float64(tmp_path: Path, warm_processes: None, block: int) -> None:
    parts = (seeds[block * len(seeds) // BLOCKS : (block + 1) * len(seeds) // BLOCKS] for seeds in (UPDATES, STAGES, CRITICS))
    check(tmp_path / "gangs", cases_of(*parts), differences)
