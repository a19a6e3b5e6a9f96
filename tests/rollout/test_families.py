"""Engine and learner agree for families whose files and live weights differ, and tensors that an engine gets wrong are named."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from families import ALWAYS, DENSE, EOS, ORDER, EngineHost, LearnerHost, batch_of, policy, replaying, requests
from families_table import TOLERANCE, read_table, write_table

from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.learn.batch import UNKNOWN_EXPERT
from rlhfless_ray.learn.model_checks import WITH_ROUTERS
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.load_policy import check_files
from rlhfless_ray.weights.tensor_slice import whole_slices

sys.path.insert(0, str(Path(__file__).parents[1] / "learn"))

pytestmark = [pytest.mark.engine, pytest.mark.ray]

S = 120.0
WORST: dict[str, float] = {}  # largest difference of a token's log-probability, by family
ENGINE = EngineSettings(max_model_len=160, max_running=32, block_size=32, kv_cache_mb=32, gpu_memory_share=0.5)
OTHER_FORM = {  # their models have other tensors than their files
    *("exaone_moe", "flex_olmo", "gpt_neox", "granitemoehybrid", "hunyuan_v1_moe", "mellum", "mixtral", "nemotron_h"),
    *("olmoe", "qwen2_moe", "qwen3_moe"),
}
GARBLED = {
    "llama": "model.layers.1.self_attn.k_proj.weight",
    "qwen2_moe": "model.layers.0.mlp.shared_expert.down_proj.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.2.down_proj.weight",
    "mixtral": "model.layers.0.block_sparse_moe.gate.weight",
    "olmoe": "model.layers.1.post_attention_layernorm.weight",
    "gemma3": "model.embed_tokens.weight",
}


def families(*names: str) -> list[Any]:
    return [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.fixture(scope="module")
def hosts(ray_cluster: None) -> Iterator[tuple[Any, Any]]:
    paths = {"PYTHONPATH": ":".join([str(Path(__file__).parent), str(Path(__file__).parents[2])])}
    made = [ray.remote(kind).options(num_cpus=1, runtime_env={"env_vars": paths}).remote() for kind in (EngineHost, LearnerHost)]
    yield made[0], made[1]
    for actor in made:
        ray.kill(actor)


class Opened:
    """Policies of families, whose engine and learner are built when a test first needs them."""

    def __init__(self, hosts: tuple[Any, Any]) -> None:
        self.hosts = hosts
        self.policies: dict[str, dict[str, bytes]] = {}
        self.untrained: dict[str, Any] = {}

    def files(self, family: str) -> dict[str, bytes]:
        if family not in self.policies:
            self.policies[family] = policy(family, (ORDER + DENSE).index(family))
        return self.policies[family]

    def open(self, family: str) -> Any:
        """Return the learner's untrained weights, see `LearnerHost.open`."""
        if family not in self.untrained:
            from tests.learn.conftest import learner_settings

            engines, learners = self.hosts
            settings, has_router = learner_settings(learner={"micro_batch_tokens": 400}), family in WITH_ROUTERS
            built = engines.open.remote(family, self.files(family), replace(ENGINE, records_experts=has_router))
            made = learners.open.remote(family, self.files(family), replaying(settings) if has_router else settings)
            _, self.untrained[family] = ray.get([built, made], timeout=300)
        return self.untrained[family]


@pytest.fixture(scope="module")
def opened(hosts: tuple[Any, Any]) -> Opened:
    return Opened(hosts)


@pytest.mark.parametrize("family", families(*ORDER, *DENSE))
def test_engine_and_learner_agree_for_two_steps(hosts: tuple[Any, Any], opened: Opened, family: str) -> None:
    engines, learners = hosts
    opened.open(family)
    worst, before = [], None
    for version in range(2):
        weights = ray.get(learners.weights.remote(family), timeout=S)
        if before is not None:
            assert any(not np.array_equal(weights[name], before[name]) for name in weights), "the update changed nothing"
        before = weights
        asked = requests(seed=version)
        answers = ray.get(engines.answer.remote(family, version, weights, digests(whole_slices(weights)), asked), timeout=S)
        batch = batch_of(asked, answers)
        found = ray.get(learners.logprobs.remote(family, batch), timeout=S)
        worst.append(float(np.abs(found - batch.logprobs).max()))
        if version:  # an engine that loads the updated policy's files holds the same bits
            model = ray.get(learners.model.remote(family), timeout=S)
            assert ray.get(engines.differing.remote(family, model, digests(whole_slices(weights))), timeout=S) == ([], [])
        stats = ray.get(learners.update.remote(family, batch), timeout=S)
        assert stats.applied == 1 and stats.mismatch_max < TOLERANCE
    WORST[family] = max(worst)
    assert WORST[family] < TOLERANCE


@pytest.mark.parametrize("family", families(*WITH_ROUTERS))
def test_an_engine_tells_the_experts_of_every_token(hosts: tuple[Any, Any], opened: Opened, family: str) -> None:
    """In float32 the learner chooses the same ones by itself. Prompts of a group are computed once, and their KV is cached."""
    engines, learners = hosts
    opened.open(family)
    weights = ray.get(learners.weights.remote(family), timeout=S)
    asked = [replace(one, token_ids=(*range(2, 40), *one.token_ids)) for one in requests(seed=5)]  # a block of KV that all share
    answers = ray.get(engines.answer.remote(family, 5, weights, digests(whole_slices(weights)), asked), timeout=S)
    batch = batch_of(asked, answers, replays=True)
    assert batch.experts is not None
    unknown = (batch.experts == UNKNOWN_EXPERT).all((1, 2))
    assert np.array_equal(np.flatnonzero(unknown), np.cumsum(batch.lengths) - 1) and batch.experts[~unknown].max() < 4
    free, replayed, wrong = (
        np.abs(ray.get(learners.logprobs.remote(family, one), timeout=S) - batch.logprobs).max()
        for one in (
            batch_of(asked, answers),
            batch,
            replace(batch, experts=np.where(unknown[:, None, None], UNKNOWN_EXPERT, batch.experts ^ 1)),
        )
    )
    assert max(free, replayed) < TOLERANCE < 1e-2 < wrong


def test_the_page_lists_these_families() -> None:
    """With FAMILIES_TABLE=write the differences of this run go into the page."""
    if os.environ.get("FAMILIES_TABLE") == "write":
        assert WORST.keys() == {*ORDER, *DENSE}, "the table needs every family: run the whole file"
        write_table({family: WORST[family] for family in sorted(WORST)})
    written = read_table()
    assert list(written) == sorted([*ORDER, *DENSE]) and max(written.values()) < TOLERANCE


@pytest.mark.parametrize("family", families(*ORDER, *DENSE))
def test_published_and_exported_names_are_those_of_save_pretrained(opened: Opened, family: str, tmp_path: Path) -> None:
    """Names, shapes and bits of a policy that was loaded and not trained; a checkpoint keeps the model's own names."""
    import torch
    from safetensors.torch import load
    from transformers import AutoModelForCausalLM

    files = opened.files(family)
    wanted = load(files["model.safetensors"])
    weights, kept, exported = opened.open(family)
    assert {name: array.shape for name, array in weights.items()} == {name: tuple(x.shape) for name, x in wanted.items()}
    assert all(np.array_equal(weights[name], x.numpy()) for name, x in wanted.items())
    assert load(exported).keys() == wanted.keys() and all(torch.equal(x, wanted[name]) for name, x in load(exported).items())
    assert (load(kept).keys() != wanted.keys()) == (family in OTHER_FORM)
    for name, content in {**files, "model.safetensors": exported}.items():
        (tmp_path / name).write_bytes(content)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    live = load(kept)
    assert all(torch.equal(x, live[name]) for name, x in model.state_dict().items() if name in live)


@pytest.mark.parametrize("family", families(*ORDER))
def test_a_tensor_that_an_engine_gets_wrong_is_named(hosts: tuple[Any, Any], opened: Opened, family: str) -> None:
    engines, learners = hosts
    opened.open(family)
    weights, model = ray.get([learners.weights.remote(family), learners.model.remote(family)], timeout=S)
    published, asked, garbled = digests(whole_slices(weights)), requests(seed=7), GARBLED[family]
    assert garbled in weights
    answers = ray.get(engines.answer.remote(family, 10, weights, published, asked, garbled), timeout=S)
    batch = batch_of(asked, answers)
    found = ray.get(learners.logprobs.remote(family, batch), timeout=S)
    mean = float(np.abs(found - batch.logprobs).mean())
    print(family, garbled, mean)
    assert mean > 1e-3, "above the tolerance in float32"
    wrong, held = ray.get(engines.differing.remote(family, model, published), timeout=S)
    assert wrong == []
    assert held == [garbled]
    spoiled = {**published, garbled: published[garbled] ^ 1}
    with pytest.raises(ray.exceptions.RayTaskError, match=garbled):
        ray.get(engines.answer.remote(family, 12, weights, spoiled, asked), timeout=S)
    assert ray.get(engines.differing.remote(family, model, spoiled), timeout=S) == ([garbled], [])


def test_the_checks_before_a_run_accept_these_policies(opened: Opened) -> None:
    for family in ORDER + DENSE:
        files = opened.files(family)
        check_files(files)
        assert json.loads(files["config.json"])["eos_token_id"] == EOS
