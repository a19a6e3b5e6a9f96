from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.tensor_slice import TensorSlice, whole_slices

pytestmark = pytest.mark.engine
CPU = EngineSettings(max_model_len=64, max_running=4, block_size=32, kv_cache_mb=8, gpu_memory_share=0.5)


@pytest.fixture
def actor(sampling: ModuleType) -> Any:
    from rlhfless_ray.engine.exact_actor import ExactEngineActor

    made = ExactEngineActor({}, CPU)
    made.loaded = []
    made.engine = SimpleNamespace(
        unpark=lambda: None,
        check=lambda channel, version: channel.check(version),
        load=lambda version, weights, base: made.loaded.append((version, dict(weights))),
    )
    return made


def test_weights_are_checked_before_they_are_used(actor: Any) -> None:
    weights = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
    published = digests(whole_slices(weights))
    spans = actor.load(4, whole_slices(weights), published)
    assert [(s.activity, s.what) for s in spans] == [("transfer", "load version 4")]
    shards = [{TensorSlice("a", (6,), start, start + 3): weights["a"][start : start + 3]} for start in (0, 3)]
    shards[0] |= whole_slices({"b": weights["b"]})
    of_shards = {name: digest for shard in shards for name, digest in digests(shard).items()}
    actor.load(4, shards[0], of_shards, None, shards[1])
    for version, found in actor.loaded:
        assert version == 4 and found.keys() == weights.keys() and all(np.array_equal(found[name], x) for name, x in weights.items())
    weights["a"][3] = np.nextafter(weights["a"][3], 9)
    with pytest.raises(ValueError, match="version 5 arrived damaged: a differ"):
        actor.load(5, whole_slices(weights), published)
    with pytest.raises(ValueError, match=r"version 5 arrived damaged: a\[3:6\] differ"):
        actor.load(5, shards[0], of_shards, None, shards[1])
    assert len(actor.loaded) == 2


def test_engines_on_gpu_reuse_the_model_compiled_for_the_same_files(
    sampling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's name of it has the folder's path in it."""
    import vllm.envs as envs

    from rlhfless_ray.engine.engine_arguments import engine_folder

    # once there is an engine in a process, vLLM reads the environment no more
    monkeypatch.setattr(envs, "__getattr__", getattr(envs.__getattr__, "__wrapped__", envs.__getattr__))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    files, gpu, cpu = {"config.json": b"{}"}, replace(CPU, device="gpu"), CPU
    scratch = [tmp_path / "a", tmp_path / "b"]
    first, again = (engine_folder(one, files, gpu) for one in scratch)
    assert first == again and first.is_relative_to(tmp_path / "cache") and (first / "config.json").read_bytes() == b"{}"
    assert [engine_folder(one, files, cpu) for one in scratch] == scratch
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    assert engine_folder(tmp_path / "c", files, gpu) == tmp_path / "c"


@pytest.mark.parametrize("several", [False, True], ids=["a pool each", "several pools"])
def test_device_memory_of_a_parked_engine_excludes_sleeping_pools(actor: Any, monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    """Counted as torch counts it, an engine that sleeps would hold more than its node may keep warm, and would be ended each time."""
    import torch

    from rlhfless_ray.engine.vllm_engine import VllmEngine, find_sleeping_pools
    from rlhfless_ray.local.process_memory import own_memory_mb

    weights, cache = ((SimpleNamespace(id=(0, number)), None) for number in (1, 2))
    pools = {"weights": [weights], "kv_cache": [cache]} if several else {"weights": weights, "kv_cache": cache}
    allocator = SimpleNamespace(allocator_and_pools=pools)
    assert find_sleeping_pools(allocator) == {(0, 1), (0, 2)}
    sizes = {(0, 0): 300, (0, 1): 6_000, (0, 2): 60_000, (1, 0): 200}  # MB: the last is of CUDA graphs
    cumem = SimpleNamespace(CuMemAllocator=SimpleNamespace(get_instance=lambda: allocator))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cumem)
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda: [{"segment_pool_id": pool, "total_size": mb * 2**20} for pool, mb in sizes.items()]
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: sum(sizes.values()) * 2**20)
    engine = VllmEngine.__new__(VllmEngine)
    engine.on_cpu, slept = False, []
    engine.engine = SimpleNamespace(sleep=lambda level: slept.append(level), collective_rpc=lambda function, args: [None])
    actor.engine, actor.settings = engine, replace(CPU, device="gpu")
    report = actor.park()
    assert slept == [2] and engine.version is None
    assert report["spans"][-1].what == "give memory back, 500 MB stay"
    assert 500 < report["memory_mb"] < 500 + 2 * own_memory_mb()


def test_a_parked_engine_drops_pages_that_arrived_with_requests(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are views of objects, whose memory the object store could not free."""
    import ray

    from rlhfless_ray.engine.exact_actor import ANY_VERSION
    from rlhfless_ray.prefix.pages import Bundle, PageLayout, PageStore

    store = PageStore()
    store.kind = PageLayout(b"kind", 4, 16)
    actor.engine = SimpleNamespace(pages=store, park=lambda: 0.0, memory_mb=lambda: 1.0)
    bundle = Bundle.seal(store.kind.start(ANY_VERSION), [b"a", b"b"], np.zeros((2, 16), np.uint8))
    monkeypatch.setattr(ray, "get", lambda ref, timeout: bundle)
    assert actor.receive_pages(["reference"]) and set(store.rows) == {b"a", b"b"}
    actor.park()
    assert not store.rows and not actor.carried
