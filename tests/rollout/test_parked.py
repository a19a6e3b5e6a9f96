"""A parked engine gives weights and KV cache back and answers as before once it has loaded; what is imported before it is built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from asking import FILES, answer, assert_same, put, requests, weights_of

from rlhfless_ray.weights.model_folder import without_weights

pytestmark = pytest.mark.engine

CACHE_MB = 96


def private_mb() -> float:
    return psutil.Process().memory_full_info().uss / 2**20


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "pages"])
def engine(request: pytest.FixtureRequest, new_engine: Callable[..., Any]) -> Any:
    made = new_engine(FILES["A"], kv_cache_mb=CACHE_MB, prefix_kv=request.param)
    put(made, weights_of(FILES["A"]))
    return made


def test_a_parked_engine_keeps_neither_weights_nor_cache(engine: Any) -> None:
    """The weights are those of before, so prompts that were cached would be found: as zeros, had the engine not forgotten them."""
    asked = requests()
    before = answer(engine, asked)
    held_mb = private_mb()
    engine.park()
    assert held_mb - private_mb() > 0.5 * CACHE_MB
    assert engine.version is None
    put(engine, weights_of(FILES["A"]))
    assert_same(answer(engine, asked), before)
    engine.park()
    put(engine, weights_of(FILES["B"]))
    other = answer(engine, asked)
    put(engine, weights_of(FILES["A"]))
    assert_same(answer(engine, asked), before)
    assert any(other[key].token_ids.tolist() != one.token_ids.tolist() for key, one in before.items())


def test_a_working_engine_cannot_be_parked(engine: Any) -> None:
    asked = requests(4)
    before = answer(engine, asked)
    at_work = engine.generate(asked, 0.0)
    next(at_work)
    with pytest.raises(RuntimeError, match="running requests"):
        engine.park()
    at_work.close()
    assert_same(answer(engine, asked), before)


PROGRAM = """
import atexit, gc, json, os, sys
from pathlib import Path

atexit.register(lambda: print(gc.get_freeze_count()))  # the first, so called last
from rlhfless_ray.engine.exact_actor import ExactEngineActor
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.weights.model_folder import without_weights
files = {file.name: file.read_bytes() for file in Path(sys.argv[1]).iterdir()}
settings = EngineSettings(max_model_len=64, max_running=4, block_size=32, kv_cache_mb=8, gpu_memory_share=0.5)
actor = ExactEngineActor(files, settings)
prewarmed = set(sys.modules)
kept = actor.park()
actor.open(1)
times = os.times()
print(json.dumps({
    "prewarmed": sorted(prewarmed), "later": sorted(set(sys.modules) - prewarmed), "kept": kept["memory_mb"],
    "children_s": times.children_user + times.children_system,
}))
"""


def test_a_prewarmed_process_has_its_imports_behind_it(tmp_path: Path) -> None:
    """As on a node that never saw this model: vLLM, which keeps notes on models under VLLM_CACHE_ROOT, finds none."""
    (tmp_path / "model").mkdir()
    for name, content in without_weights(FILES["A"]).items():
        (tmp_path / "model" / name).write_bytes(content)
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"} | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model")], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    *_, told, frozen = done.stdout.splitlines()
    report = json.loads(told)
    assert int(frozen) > 100_000, "what is imported is not looked through for garbage before the process ends"
    assert {"vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2"} <= set(report["prewarmed"])
    assert len(report["later"]) < len(report["prewarmed"]) / 10
    unused = {"scipy", "networkx", "torch._inductor.lowering"}  # by an engine that is eager and reads text
    assert not unused & {*report["prewarmed"], *report["later"]}
    assert report["children_s"] < 1.0  # no other Python was started to look at the model
    assert report["kept"] > 50.0  # a process without an engine reports what it holds, too
