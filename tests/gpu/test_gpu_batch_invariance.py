"""Whether a response depends on its batch, with vLLM's kernels and with those of VLLM_BATCH_INVARIANT=1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.gpu.hosts import ON, HostedEngine
from tests.gpu.lanes import SETTINGS, compare, in_pairs, weights_of
from tests.learn.tiny_policy import tiny_policy

pytestmark = pytest.mark.gpu

LONG = replace(SETTINGS, max_model_len=320, max_running=64, end_token_id=None)
FILES = {dtype: tiny_policy(0, spread=0.15, dtype=dtype) for dtype in ("float32", "bfloat16")}
HOSTS = {"default": {}, "invariant": {"VLLM_BATCH_INVARIANT": "1"}}
engines: dict[tuple[str, str, str], HostedEngine] = {}


def begin(hosts: Any, items: list[Any]) -> None:
    for item in items:
        kind, dtype = (item.callspec.params[name] for name in ("kind", "dtype"))
        host = hosts.get("EngineTools", f"batches {kind}", **HOSTS[kind])
        for speculation in ("off", "on"):
            settings = replace(LONG, dtype=dtype, speculation=speculation)
            engines[kind, dtype, speculation] = HostedEngine(host, f"{dtype} {speculation}", FILES[dtype], settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["invariant", pytest.param("default", marks=[pytest.mark.skipif(ON == "cpu", reason="as invariant")])])
def test_a_response_alone_in_a_batch_and_with_drafts(hosts: Any, record: Callable[..., None], kind: str, dtype: str) -> None:
    """With the default kernels the figures are recorded, and nothing is demanded."""
    asked = in_pairs(temperature=1.0, seed=6)
    off, on = engines[kind, dtype, "off"], engines[kind, dtype, "on"]
    off.ask("load", 1, weights_of(FILES[dtype]))
    on.ask("load", 1, weights_of(FILES[dtype]))
    wanted = off.ask("answer", asked)
    few = [replace(one, key=key) for key, one in enumerate(asked[::4])]
    alone = {one.key: off.ask("answer", [replace(one, key=0)])[0] for one in few}
    greedy = [replace(one, temperature=0.0) for one in asked]
    found = {
        "alone": compare(alone, {key: wanted[4 * key] for key in alone}),
        "with_drafts": compare(on.ask("answer", asked), wanted),
        "greedy_with_drafts": compare(on.ask("answer", greedy), off.ask("answer", greedy)),
    }
    record(**found)
    if kind == "invariant":
        assert all(one["equal"] == one["responses"] for one in found.values())
