"""Engines with 8-bit weights, against the learner's forward pass and against engines that are built afresh."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from asking import FILES, answer, put, requests, weights_of
from learner_reference import load, logprobs

from rlhfless_ray.runtime.agreement import tolerance
from rlhfless_ray.types import Completion, Request

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, new_engine: Callable[..., Any]) -> Any:
    made = new_engine(FILES["A"], quantization="int8", dtype=request.param)
    made.dtype = request.param
    put(made, weights_of(FILES["A"]))
    return made


def mean_mismatch(files: dict[str, bytes], asked: list[Request], done: dict[int, Completion]) -> float:
    model, apart = load(files), []
    for request in asked:
        one = done[request.key]
        ids = torch.tensor([*request.token_ids, *one.token_ids.tolist()])
        with torch.no_grad():
            expected = logprobs(model, {"ids": ids, "prompt": len(request.token_ids)}, 1.0).numpy()
        apart.append(np.abs(one.logprobs - expected))
    return float(np.concatenate(apart).mean())


def test_int8_engines_stay_close_to_the_learner(engine: Any) -> None:
    """Under every version: weights are quantised when they are loaded, the first time and later."""
    asked = requests()
    for name in "ABA":
        put(engine, weights_of(FILES[name]))
        mismatch = mean_mismatch(FILES[name], asked, answer(engine, asked))
        print(f"{engine.dtype} {name}: mean mismatch {mismatch:.4f}")
        assert 1e-4 < mismatch < tolerance(engine.dtype, "int8")


def test_a_reload_equals_a_new_engine(engine: Any, new_engine: Callable[..., Any]) -> None:
    fresh = new_engine(FILES["B"], quantization="int8", dtype=engine.dtype)
    put(fresh, weights_of(FILES["B"]))
    put(engine, weights_of(FILES["B"]))
    found, wanted = answer(engine, requests()), answer(fresh, requests())
    for key, one in wanted.items():
        np.testing.assert_array_equal(found[key].token_ids, one.token_ids)
        np.testing.assert_array_equal(found[key].logprobs, one.logprobs)


def test_a_missing_weight_is_named(engine: Any) -> None:
    weights = weights_of(FILES["A"])
    del weights["model.layers.0.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks 1 of the engine's weights, model\.layers\.0\.mlp\.down_proj\.weight"):
        put(engine, weights)
    put(engine, weights_of(FILES["A"]))


def test_a_continued_response_has_the_same_tokens(engine: Any) -> None:
    """Also after the engine was parked, and with other responses beside it."""
    put(engine, weights_of(FILES["A"]))
    asked = requests(8)
    whole = answer(engine, asked)
    engine.park()
    engine.unpark()
    put(engine, weights_of(FILES["A"]))
    halves = {key: tuple(one.token_ids[: len(one.token_ids) // 2].tolist()) for key, one in whole.items()}
    (rest,) = engine.generate([replace(r, generated=halves[r.key]) for r in asked[:5]])
    found = np.split(rest.token_ids, np.cumsum(rest.counts)[:-1])
    for key, tokens in zip(rest.keys.tolist(), found, strict=True):
        assert [*halves[key], *tokens.tolist()] == whole[key].token_ids.tolist()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the limit is one of x86")
def test_largest_products_do_not_saturate_without_instructions_for_8_bits() -> None:
    """Sums are those of whole numbers in a process held to AVX2, and with larger weights they are not: kernels are chosen once."""
    code = """if True:
        import torch
        from rlhfless_ray.engine.prepare_vllm import prepare
        prepare()
        from vllm import _custom_ops as ops
        from rlhfless_ray.engine import int8_linear
        assert not int8_linear.has_int8()
        for symmetric in (True, False):
            for largest, exact in ((int8_linear.LARGEST_IN_16_BITS, True), (int8_linear.LARGEST, False)):
                weight, inputs = torch.full((64, 128), largest, dtype=torch.int8), torch.ones(3, 128)
                inputs[:, 0] = 0
                scales = torch.ones(64, 1)
                kernel = ops.create_onednn_scaled_mm(weight.t(), scales, torch.float32, True, not symmetric, 32)
                whole, by_row, zeros = ops.onednn_scaled_int8_quant(inputs, None, None, symmetric)
                adjust = None if symmetric else weight.sum(1, keepdim=True, dtype=torch.float32).t().contiguous()
                out, wanted = torch.empty(3, 64), inputs @ weight.t().float()
                ops.onednn_scaled_mm(kernel, whole, out, by_row, zeros, adjust, None)
                assert torch.allclose(out, wanted, rtol=1e-2) == exact, (symmetric, largest, out[0, 0], wanted[0, 0])
    """
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
