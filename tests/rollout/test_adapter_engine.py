"""Engines that hold an adapter on its base, against the learner's forward pass and engines with merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import FILES, VERSIONS, answer, requests, weights_of
from families import pack_4_bits, policy
from learner_reference import load, logprobs

from rlhfless_ray.engine.engine_settings import ServedAdapter
from rlhfless_ray.learn.lora import LoraAdapters, saved_name
from rlhfless_ray.learn.policy_model import load_model
from rlhfless_ray.local.laptop.processor import has_int4
from rlhfless_ray.recipe import LoraConfig
from rlhfless_ray.types import Completion, Request
from rlhfless_ray.weights.adapter import ADAPTABLE, SERVED_FAMILIES
from rlhfless_ray.weights.model_folder import stored_weights, write_folder
from rlhfless_ray.weights.tensor_file import as_numpy

pytestmark = pytest.mark.engine
RANK, ALPHA = 3, 7  # vLLM has no such rank: it makes room for 8
SERVED = ServedAdapter(RANK, ALPHA, ADAPTABLE)


class Trained:
    """A policy with random adapters, as the learner has it. `weights`: what it publishes."""

    def __init__(self, files: dict[str, bytes], seed: int, targets: tuple[str, ...] = ("all-linear",), model: Any = None) -> None:
        self.model = load(files) if model is None else model
        LoraAdapters(self.model, LoraConfig(rank=RANK, alpha=ALPHA, target_modules=list(targets)), seed)
        own = {name: x for name, x in self.model.named_parameters() if ".lora_" in name}
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, x in own.items():
                if ".lora_B" in name:
                    x.copy_(0.1 * torch.randn(x.shape, generator=generator))
        self.weights = {saved_name(name): as_numpy(x.detach()) for name, x in own.items()}

    def largest_mismatch(self, asked: list[Request], done: dict[int, Completion]) -> float:
        worst = 0.0
        for request in asked:
            one = done[request.key]
            ids = torch.tensor([*request.token_ids, *one.token_ids.tolist()])
            with torch.no_grad():
                expected = logprobs(self.model, {"ids": ids, "prompt": len(request.token_ids)}, 1.0).float().numpy()
            worst = max(worst, float(np.abs(one.logprobs - expected).max()))
        return worst


@pytest.fixture(scope="module")
def engine(new_engine: Callable[..., Any]) -> Any:
    return new_engine(FILES["A"], adapter=SERVED)


def test_engine_and_learner_agree_under_every_version(engine: Any) -> None:
    """Also where a version adapts fewer layers than the one before, and after the engine was parked."""
    asked = requests()
    with pytest.raises(ValueError, match="but its base is missing"):
        engine.load(next(VERSIONS), Trained(FILES["A"], 1).weights)
    for seed, targets in ((1, ("all-linear",)), (2, ("q_proj", "down_proj")), (3, ("all-linear",))):
        trained = Trained(FILES["A"], seed, targets)
        engine.load(next(VERSIONS), trained.weights, weights_of(FILES["A"]))
        assert trained.largest_mismatch(asked, answer(engine, asked)) < 1e-4
        engine.park()
        engine.unpark()


def test_adapters_give_the_tokens_of_merged_weights(engine: Any, new_engine: Callable[..., Any]) -> None:
    trained = Trained(FILES["A"], 4)
    merged = weights_of(FILES["A"])
    scale = ALPHA / RANK
    for name in merged:
        a, b = (trained.weights.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight") for part in "AB")
        if a is not None:
            merged[name] = merged[name] + scale * b @ a
    plain = new_engine(FILES["A"])
    plain.load(next(VERSIONS), merged)
    engine.load(next(VERSIONS), trained.weights, weights_of(FILES["A"]))
    found, wanted = answer(engine, requests()), answer(plain, requests())
    for key, one in wanted.items():
        np.testing.assert_array_equal(found[key].token_ids, one.token_ids)
        np.testing.assert_allclose(found[key].logprobs, one.logprobs, atol=1e-4)


def test_layers_that_the_engine_lacks_are_named(engine: Any) -> None:
    weights = {name.replace("layers.1", "layers.7"): x for name, x in Trained(FILES["A"], 1).weights.items()}
    with pytest.raises(ValueError, match=r"adapts 7 layers that the engine lacks, model\.layers\.7"):
        engine.load(next(VERSIONS), weights, weights_of(FILES["A"]))
    with pytest.raises(RuntimeError, match="no weights"):
        answer(engine, requests(1))


def test_an_adapter_on_a_base_in_8_bits(new_engine: Callable[..., Any]) -> None:
    trained = Trained(FILES["A"], 5)
    made = new_engine(FILES["A"], adapter=SERVED, quantization="int8")
    made.load(next(VERSIONS), trained.weights, weights_of(FILES["A"]))
    asked = requests()
    assert 1e-4 < trained.largest_mismatch(asked, answer(made, asked)) < 2.0


def stored(files: dict[str, bytes]) -> dict[str, np.ndarray]:
    """The base as its files have it."""
    return {name: as_numpy(tensor) for name, tensor in stored_weights(files)}


@pytest.mark.skipif(not has_int4(), reason="this processor has no kernel for weights of 4 bits")
def test_an_adapter_on_a_base_in_4_bits(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    """Engines keep the 4 bits. They agree with the learner, which computes with their values, as two programs do in bfloat16."""
    files = pack_4_bits(policy("qwen2", dtype="bfloat16"))
    trained = Trained(files, 7, model=load_model(write_folder(tmp_path / "packed", files), "bfloat16", False))
    made = new_engine(files, adapter=SERVED, max_model_len=160, dtype="bfloat16")
    made.load(next(VERSIONS), trained.weights, stored(files))
    model = made.core.model_executor.driver_worker.get_model()
    kernels = {type(getattr(getattr(module, "scheme", None), "kernel", None)).__name__ for module in model.modules()}
    assert "CPUWNA16LinearKernel" in kernels
    asked = requests(8)
    assert trained.largest_mismatch(asked, answer(made, asked)) < 0.05


ALWAYS = ("llama", "phi3")  # separate and fused matrices


@pytest.mark.parametrize("family", [one if one in ALWAYS else pytest.param(one, marks=pytest.mark.long) for one in SERVED_FAMILIES])
def test_families(family: str, new_engine: Callable[..., Any]) -> None:
    files = policy(family)
    trained = Trained(files, 6)
    made = new_engine(files, adapter=SERVED, max_model_len=160)
    made.load(next(VERSIONS), trained.weights, stored(files))
    asked = requests(8)
    assert trained.largest_mismatch(asked, answer(made, asked)) < 1e-4
