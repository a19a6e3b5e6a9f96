"""Which layers a rank publishes, where each rank holds the whole model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.learn.rank_weights import RankWeights
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.tensor_slice import HeldSlices


def test_the_ranks_of_each_node_publish_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first of three ranks is alone on its node."""
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "learner": {"ranks": 3}}
    settings = learner_settings(Recipe.parse(tree))
    shape = {"vocab_size": 32, "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=False))
    engine = SimpleNamespace(module=SimpleNamespace(model=model))
    shards = []
    for rank, share in enumerate([(0, 1), (0, 2), (1, 2)]):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        held = RankWeights(replace(settings, rank=rank), engine, None, None, False)
        shards.append(dict(HeldSlices.of(held.published(*share))))
        assert held.holds_all
    assert shards[0].keys() == {*shards[1], *shards[2]} == set(dict(model.named_parameters()))
    assert not shards[1].keys() & shards[2].keys() and len(shards[1]) > 3 < len(shards[2])
    for name, parameter in model.named_parameters():
        for shard in shards:
            assert name not in shard or np.array_equal(shard[name], parameter.detach().numpy())
