"""The moving average of bfloat16 weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe import Recipe


def test_changes_that_bfloat16_would_round_away_are_averaged() -> None:
    tree = {
        "prompts": {"task": "chain"},
        "reward": {"function": "task"},
        "policy": {"dtype": "bfloat16"},
        "learner": {"zero_stage": 1},
        "ema": {"beta": 0.995},
    }
    rank = TrainerRank(learner_settings(Recipe.parse(tree)))
    start = torch.linspace(0.5, 2.0, 64).bfloat16()
    weights = {"w": start}
    rank.held = SimpleNamespace(own_layers=weights.items)  # type: ignore[assignment]
    rank._average({})
    wanted, in_bfloat16 = start.double(), start.clone()
    for number in range(1, 21):
        weights["w"] = (start.float() * (1 + 0.005 * number)).bfloat16()
        rank._average()
        wanted = 0.995 * wanted + 0.005 * weights["w"].double()
        in_bfloat16.lerp_(weights["w"], 0.005)
    assert rank.average["w"].dtype == torch.float32
    torch.testing.assert_close(rank.average["w"].double(), wanted, rtol=1e-6, atol=0.0)
    assert torch.equal(in_bfloat16, start) and not torch.equal(rank.average["w"].bfloat16(), start), "the average has moved"
