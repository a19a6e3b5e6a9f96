"""With vLLM's kernels of VLLM_BATCH_INVARIANT=1 a response does not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.gpu.hosts import HostedEngine
from tests.gpu.lanes import SETTINGS, compare, spread_policy, weights_of
from tests.learn.tiny_policy import in_pairs

pytestmark = pytest.mark.gpu

LONG = replace(SETTINGS, max_model_len=320, max_running=64, end_token_id=None)
engines: dict[tuple[str, str], HostedEngine] = {}


def begin(hosts: Any, items: list[Any]) -> None:
    host = hosts.get("EngineTools", "batches", VLLM_BATCH_INVARIANT="1")
    for item in items:
        dtype = item.callspec.params["dtype"]
        for speculation in ("off", "on"):
            settings = replace(LONG, dtype=dtype, speculation=speculation)
            engines[dtype, speculation] = HostedEngine(host, f"{dtype} {speculation}", spread_policy(dtype=dtype), settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_response_alone_in_a_batch_and_with_drafts(hosts: Any, record: Callable[..., None], dtype: str) -> None:
    asked = in_pairs(temperature=1.0, seed=6)
    off, on = engines[dtype, "off"], engines[dtype, "on"]
    off.ask("load", 1, weights_of(spread_policy(dtype=dtype)))
    on.ask("load", 1, weights_of(spread_policy(dtype=dtype)))
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
    assert all(one["equal"] == one["responses"] for one in found.values())
