"""A reward model that is divided among processes gives what a whole one gives, and ends as a whole."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.local.cluster import check_width
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.local.member_process import LOST_RC
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.load_reward import load_reward
from rlhfless_ray.weights.load_policy import load_tokenizer
from rlhfless_ray.weights.model_folder import write_folder
from tests.conftest import ROOT, environment
from tests.reward.reward_models import reward_model, tokenizer_files
from tests.reward.test_model import by_transformers, loaded, sequences

FAMILIES = ["Qwen2", pytest.param("Mistral", marks=pytest.mark.long)]
WORKER = """
import json, pickle, sys, time
from rlhfless_ray.local.member_process import members_memory_mb

source, asked = pickle.load(open(sys.argv[1], "rb"))
worker = source.worker(1.0)
worker.open(2)

def rewards(sequences):
    scores = worker.score(list(enumerate(sequences)), float("inf"))
    return [score.reward for score in sorted(scores, key=lambda score: score.key)]

first = rewards(asked)
worker.park()
again = rewards(asked[:3])
parameters = sum(parameter.numel() for parameter in worker.model.hidden.parameters())
print(json.dumps([first, again, parameters, members_memory_mb()]), flush=True)
worker.members[0].process.kill()
time.sleep(60)
"""


@pytest.mark.learner
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize("family", FAMILIES)
def test_divided_among_two_it_gives_what_transformers_gives_and_a_lost_member_ends_it(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    source = loaded(folder, reward_model(family=family, kv_heads=2), load_tokenizer(tokenizer_files(), False), tensor_parallel=2)
    asked = sequences(np.random.default_rng(1))
    expected = by_transformers(folder, asked)
    (tmp_path / "work").write_bytes(pickle.dumps((source, asked)))
    (tmp_path / "worker.py").write_text(WORKER)
    command = forked([sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "work")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment())
    assert done.returncode == LOST_RC, done.stderr
    first, again, parameters, members_mb = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(first, expected, atol=2e-5)
    np.testing.assert_allclose(again, expected[:3], atol=2e-5)
    whole = sum(
        parameter.numel() for parameter in loaded(folder, reward_model(family=family, kv_heads=2)).worker(1.0).model.hidden.parameters()
    )
    assert parameters < 0.7 * whole and members_mb > 10


def test_what_cannot_be_divided_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.tensor_parallel: 2 does not divide the model's 1 KV heads"):
        loaded(tmp_path, reward_model(), tensor_parallel=2)
    with pytest.raises(UserError, match=r"reward\.tensor_parallel: only a reward model can be divided"):
        Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task", "tensor_parallel": 2}})
    write_folder(tmp_path / "gpt2", reward_model(family="Qwen2", config={"model_type": "gpt2"}))
    with pytest.raises(UserError, match=r"reward\.tensor_parallel: models of type gpt2 are not tested with it"):
        load_reward(
            Recipe.parse({"prompts": {"task": "chain"}, "reward": {"model_path": str(tmp_path / "gpt2"), "tensor_parallel": 2}}), None
        )
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"model_path": str(tmp_path), "tensor_parallel": 2}})
    with pytest.raises(UserError, match=r"the 2 slots of a reward model must be on one node, but the largest node has 1 \(CPU cores\)"):
        check_width(recipe, 1, "cpu")
    check_width(recipe, 2, "cpu")
