"""A head learns the policy's distribution, and engines can load what was written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.engine.head_config import is_head, refusal
from rlhfless_ray.engine.head_model import load_head
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.rollout.train_head import head_config, train_head
from rlhfless_ray.runtime.head_for_policy import head_for_policy
from rlhfless_ray.weights.model_folder import write_folder

VOCABULARY = 24


def policy(folder: Path) -> tuple[Path, dict[str, object]]:
    """Write a policy with random weights and a clear opinion of what comes next."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(folder)
    return folder, {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}


def test_a_head_learns_the_distribution_and_can_be_loaded(tmp_path: Path) -> None:
    folder, config = policy(tmp_path / "policy")
    made, said = head_config(config, 32), list[str]()
    assert is_head(made) and refusal(made, config) is None
    sequences = np.random.default_rng(0).integers(0, VOCABULARY, (128, 20)).tolist()
    torch.manual_seed(5)
    files = train_head(folder, made, [*sequences, [1], [1, 2]], passes=10, say=said.append)
    shared = [int(re.findall(r"(\d+)%", line)[0]) for line in said]
    assert len(shared) == 10 and shared[-1] > shared[0] + 25 and shared[-1] > 50
    head = load_head(write_folder(tmp_path / "head", files))
    assert head.embed_tokens is not None and head.fc.in_features == 3 * 64


@pytest.mark.parametrize("layers", [1, 2, 4, 8, 28])
def test_a_head_reads_three_layers_of_the_policy(layers: int) -> None:
    config = {"num_hidden_layers": layers, "hidden_size": 64, "vocab_size": 9, "architectures": ["Qwen2ForCausalLM"]}
    assert refusal(head_config(config, 64), config) is None


def test_a_width_or_a_folder_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = GenerationRecipe.of({"prompts": {"task": "chain"}})
    with pytest.raises(UserError, match="--hidden: 40 is no multiple of 32"):
        head_for_policy(recipe, tmp_path / "head", 40, 1)
    (tmp_path / "file").write_text("there")
    with pytest.raises(UserError, match=r"--out: .* is there already"):
        head_for_policy(recipe, tmp_path, 32, 1)
