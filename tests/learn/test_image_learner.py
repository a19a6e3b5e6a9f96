"""What an update changes of a policy that sees: its text model, its vision tower only if asked, and adapters on the text model only."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load

from tests.learn.conftest import joined, learner_settings, run_gangs
from tests.learn.test_image_inputs import IMAGES, batch_of_prompts
from tests.vision_policy import vision_policy

pytestmark = pytest.mark.learner
CASES = {"frozen": {}, "frozen, ZeRO 1": {"stage": 1}, "trained": {"learner": {"train_vision": True}}, "adapters": {"lora": {"rank": 4}}}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    policy = vision_policy("qwen3_vl", tmp_path_factory.mktemp("policy"))
    _, batch = batch_of_prompts(policy, IMAGES)
    files = {file.name: file.read_bytes() for file in policy.iterdir()}
    cases = {name: {"settings": learner_settings(**changes), "files": files, "batches": [batch] * 2} for name, changes in CASES.items()}
    found = run_gangs(tmp_path_factory.mktemp("gangs") / "one", {1: cases})[1]
    return load(files["model.safetensors"]), {name: joined(found, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_what_an_update_changes(results, name):
    first, found = results
    weights = found[name]["weights"][-1]
    changed = {key for key in first if not np.array_equal(first[key], weights[key])}
    assert weights.keys() == first.keys()
    assert any("language_model" in key for key in changed)
    assert any("visual" in key for key in changed) == (name == "trained")
    if name == "adapters":
        assert all(key.endswith("_proj.weight") for key in changed)


def test_zero_stages_agree(results):
    _, found = results
    one, other = (found[name]["weights"][-1] for name in ("frozen", "frozen, ZeRO 1"))
    assert all(np.allclose(one[key], other[key], atol=1e-5) for key in one)
