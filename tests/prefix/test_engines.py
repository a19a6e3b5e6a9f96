"""Real engines, each in a process of its own: what they generate does not depend on where their KV comes from."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.engine.engine_settings import EngineSettings

sys.path.insert(0, str(Path(__file__).parent.parent / "learn"))  # tiny_policy

pytestmark = [pytest.mark.ray, pytest.mark.engine]

BLOCK, LONGEST, VOCABULARY = 32, 24, 61
TOLERANCE = 1e-4  # of log-probabilities: other batches add up in another order


def settings(**changes: Any) -> EngineSettings:
    made = EngineSettings(max_model_len=320, max_running=64, block_size=BLOCK, kv_cache_mb=64, gpu_memory_share=0.5, prefix_kv=True)
    return replace(made, **changes)


def engine_class() -> type:
    """A page actor whose generation comes back whole. Local, so that Ray ships it by value."""
    from rlhfless_ray.engine.exact_actor import ExactEngineActor

    class Engine(ExactEngineActor):
        def answer(self, requests: list[Any], cut_after: int = 0) -> dict[int, tuple[np.ndarray, np.ndarray]]:
            """{key: (tokens, log-probabilities)}. `cut_after` tokens everything is cut, and its pages are kept."""
            from rlhfless_ray.engine.control_queue import ControlQueue, EngineCommand

            control_queue = ControlQueue()
            control_queue.open(0)
            if cut_after and self.engine.pages is not None:
                self.engine.pages.request_save(str(request.key) for request in requests)
            found: dict[int, list[Any]] = {request.key: [[], []] for request in requests}
            asked_to_cut: set[int] = set()  # a step with accepted drafts makes several tokens, so one may be passed over
            for progress in self.engine.generate(requests, 0.0, control_queue):
                bounds = progress.bounds
                for i, key in enumerate(progress.keys.tolist()):
                    found[key][0] += progress.token_ids[bounds[i] : bounds[i + 1]].tolist()
                    found[key][1] += progress.logprobs[bounds[i] : bounds[i + 1]].tolist()
                    if cut_after and len(found[key][0]) >= cut_after and key not in asked_to_cut:
                        asked_to_cut.add(key)
                        control_queue.put(0, EngineCommand(cut=(key,)))
            return {key: (np.array(tokens), np.array(logprobs)) for key, (tokens, logprobs) in found.items()}

        def kept(self, version: int, keys: list[int]) -> Any:
            """What was saved of cut requests."""
            pages = self.engine.pages.take_saved(map(str, keys))
            return self._seal(version, list(pages), pages)

        def put(self, version: int, prompts: list[Any], bundle: Any) -> dict[str, int]:
            from rlhfless_ray.prefix.block_hash import salt

            store = self.engine.pages
            before = store.counts.copy()
            store.clear()
            store.put(bundle, salt(version), store.wanted(salt(version), prompts))
            return dict(store.counts - before)

        def forget(self) -> None:
            """The engine's own prefix cache, and the pages."""
            self.engine.engine.reset_prefix_cache()
            if self.engine.pages is not None:
                self.engine.pages.clear()

        def counts(self) -> dict[str, int]:
            return dict(self.engine.pages.counts)

        def drafted(self) -> int:
            return sum(step.drafted for step in self.engine.take_stats().steps)

        def refused(self) -> str:
            return self.engine.pages.refused

    return Engine


class World:
    """Engines of one policy, opened on demand, and weights by version."""

    def __init__(self, **policy: Any) -> None:
        from safetensors.torch import load as load_tensors
        from tiny_policy import tiny_policy

        self.files = [tiny_policy(seed, spread=0.15, **policy) for seed in range(2)]
        self.weights = [
            {name: tensor.float().numpy() for name, tensor in load_tensors(files["model.safetensors"]).items()} for files in self.files
        ]
        self.engines: dict[str, Any] = {}

    def engine(self, name: str, **changes: Any) -> Any:
        import ray

        from rlhfless_ray.weights.model_folder import without_weights

        if name not in self.engines:
            actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1, "pages": 1})(engine_class()).remote(
                without_weights(self.files[0]), settings(**changes)
            )
            ray.get(actor.open.remote(changes.get("tensor_parallel", 1)), timeout=240)
            self.engines[name] = actor
            self.load(actor, 1, 0)
        return self.engines[name]

    def load(self, actor: Any, version: int, which: int) -> None:
        import ray

        from rlhfless_ray.weights.checksum import digests
        from rlhfless_ray.weights.tensor_slice import whole_slices

        slices = whole_slices(self.weights[which])

        ref = ray.put(slices)
        ray.get(actor.load.remote(version, ref, digests(slices), refs={version: [ref]}), timeout=60)


@pytest.fixture(scope="module")
def world(ray_cluster: None) -> Iterator[World]:
    yield from opened(World())


@pytest.fixture(scope="module")
def wide_world(ray_cluster: None) -> Iterator[World]:
    """A policy whose KV heads two members divide."""
    yield from opened(World(kv_heads=2))


def opened(made: World) -> Iterator[World]:
    import ray

    yield made
    for actor in made.engines.values():
        ray.kill(actor)


def requests(temperature: float = 1.0, seed: int = 0) -> list[Any]:
    """Pairs under a shared header; own parts from one token to more than two blocks, one of them ending with a block."""
    from rlhfless_ray.types import Request

    rng = np.random.default_rng(seed)
    header = rng.integers(2, VOCABULARY, 70).tolist()
    sizes = [1, 20, 26, 27, 58, 90, 3, 61]
    made = []
    for key, (size, _) in enumerate(itertools.product(sizes, range(2))):
        own = rng.integers(2, VOCABULARY, size).tolist() if key % 2 == 0 else own  # noqa: F821
        made.append(Request(key, (*header, *own), 1000 + 7 * key, LONGEST, temperature))
    return made


def call(method: Any, *arguments: Any) -> Any:
    import ray

    return ray.get(method.remote(*arguments), timeout=120)


def pages_of(world: World, asked: list[Any], version: int = 1) -> tuple[Any, Any]:
    """What a prefill instance makes of the requests' prompts: what it did, and one bundle of everything."""
    import ray

    from rlhfless_ray.prefix.block_hash import distinct_prefixes, salt

    maker = world.engine("prefill")
    call(maker.forget)
    prompts = [request.token_ids for request in asked]
    trie = distinct_prefixes(prompts, BLOCK, call(maker.kind).start(salt(version)))
    inner = {node.parent for node in trie.nodes}
    prefixes = [np.array(prompts[node.prompt][: node.path_end], np.int32) for n, node in enumerate(trie.nodes) if n not in inner]
    addresses = [[node.address for node in trie.nodes]]
    done, bundle = ray.get(maker.prefill.options(num_returns=2).remote(version, prefixes, addresses, [], 10.0, 1), timeout=120)
    assert done.tokens == trie.distinct_tokens and done.pages == len(trie.nodes), "each block is computed once"
    return done, bundle


def assert_same(found: dict[int, Any], wanted: dict[int, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, (tokens, logprobs) in wanted.items():
        np.testing.assert_array_equal(found[key][0], tokens)
        np.testing.assert_allclose(found[key][1], logprobs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_the_same_with_pages_of_other_engines(world: World, temperature: float) -> None:
    """Greedy and sampled, against an engine that knows nothing of pages."""
    asked = requests(temperature)
    plain, user = world.engine("plain", prefix_kv=False), world.engine("user")
    wanted = call(plain.answer, asked)
    _, bundle = pages_of(world, asked)
    call(user.forget)
    put = call(user.put, 1, [request.token_ids for request in asked], bundle)
    assert put == {"put": len(bundle.addresses)}
    before = call(user.counts)
    assert_same(call(user.answer, asked), wanted)
    after = call(user.counts)
    computed = after["computed_tokens"] - before.get("computed_tokens", 0)
    assert computed == sum(len(tokens) for tokens, _ in wanted.values()), "of each prompt its last token alone"
    assert after["loaded"] > before.get("loaded", 0)


def test_missing_pages_change_only_the_work(world: World) -> None:
    """Every second page gone: the rest is computed."""
    asked = requests()
    user = world.engine("user")
    wanted = call(world.engine("plain", prefix_kv=False).answer, asked)
    _, bundle = pages_of(world, asked)
    for first in range(2):
        some = type(bundle)(bundle.start, bundle.addresses[first::2], bundle.pages[first::2], bundle.checksums[first::2])
        call(user.forget)
        call(user.put, 1, [request.token_ids for request in asked], some)
        assert_same(call(user.answer, asked), wanted)


def test_damaged_pages_change_no_token(world: World) -> None:
    asked = requests()
    user = world.engine("user")
    wanted = call(world.engine("plain", prefix_kv=False).answer, asked)
    _, bundle = pages_of(world, asked)
    pages = bundle.pages.copy()
    pages[::3, 100] ^= 255
    call(user.forget)
    put = call(user.put, 1, [request.token_ids for request in asked], replace(bundle, pages=pages))
    assert put["damaged"] == -(-len(pages) // 3) and put["put"] == len(pages) - put["damaged"]
    assert_same(call(user.answer, asked), wanted)


def test_after_a_weight_update_no_old_page_is_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of version 1 are given to an engine with version 2, of other weights. Were the version not part of the address, the
    engine would take them and say something else: that is shown too."""
    asked = requests(0.0)
    prompts = [request.token_ids for request in asked]
    user, plain = world.engine("user"), world.engine("plain", prefix_kv=False)
    _, old = pages_of(world, asked)
    world.load(user, 2, 1)
    world.load(plain, 2, 1)
    try:
        wanted = call(plain.answer, asked)
        call(user.forget)
        assert call(user.put, 2, prompts, old) == {"foreign": len(old.addresses)}
        before = call(user.counts)
        assert_same(call(user.answer, asked), wanted)
        assert call(user.counts).get("loaded") == before.get("loaded")

        from rlhfless_ray.prefix.block_hash import chain, salt
        from rlhfless_ray.prefix.pages import Bundle

        start, forged, page_of = call(user.kind).start(salt(2)), {}, dict(zip(old.addresses, old.pages, strict=True))
        for prompt in prompts:
            for was, now in zip(chain(old.start, prompt[:-1], BLOCK), chain(start, prompt[:-1], BLOCK), strict=True):
                forged[now] = page_of[was]
        call(user.forget)
        assert call(user.put, 2, prompts, Bundle.seal(start, list(forged), np.stack(list(forged.values())))) == {"put": len(forged)}
        with pytest.raises(AssertionError):
            assert_same(call(user.answer, asked), wanted)
    finally:
        call(user.forget)
        world.load(user, 1, 0)
        world.load(plain, 1, 0)


def test_vllms_example_connector_uses_old_pages_after_a_weight_update(world: World, tmp_path: Path) -> None:
    """The test above would catch it: a connector that knows pages by their tokens alone, as the one that comes with vLLM as an
    example, takes those of version 1 under version 2."""
    import ray

    from rlhfless_ray.weights.model_folder import without_weights

    class Example(engine_class()):  # type: ignore[misc]
        def open(self, threads: int) -> Any:
            from vllm.config import KVTransferConfig

            from rlhfless_ray.engine import engine_arguments

            engine_arguments._transfer_config = lambda pages: KVTransferConfig(  # type: ignore[assignment]
                kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config={"shared_storage_path": str(tmp_path)}
            )
            return super().open(threads)

    asked, plain = requests(0.0), world.engine("plain", prefix_kv=False)
    theirs = ray.remote(Example).options(num_cpus=0).remote(without_weights(world.files[0]), settings(prefix_kv=False))
    try:
        ray.get(theirs.open.remote(1), timeout=240)
        world.load(theirs, 1, 0)
        wanted = call(plain.answer, asked)
        for _ in range(2):  # it saves, then it loads
            assert_same(call(theirs.answer, asked), wanted)
            call(theirs.forget)
        assert any(tmp_path.iterdir()), "it has saved something"
        world.load(theirs, 2, 1)
        world.load(plain, 2, 1)
        with pytest.raises(AssertionError):
            assert_same(call(theirs.answer, asked), call(plain.answer, asked))
    finally:
        world.load(plain, 1, 0)
        ray.kill(theirs)


def go_on_elsewhere(world: World, maker: Any, user: Any, asked: list[Any], cuts: tuple[int, ...]) -> int:
    """Cut each response in one engine, continue it in another with the pages, and compare it with the uncut one. Return how many tokens
    the other engine computed beside those that it drew."""
    whole, beside = call(world.engine("plain", prefix_kv=False).answer, asked), 0
    for cut_after in cuts:
        call(maker.forget)
        first = call(maker.answer, asked, cut_after)
        going = [r for r in asked if len(first[r.key][0]) < len(whole[r.key][0])]
        bundle = call(maker.kept, 1, [r.key for r in asked])
        rest = [replace(r, generated=tuple(first[r.key][0].tolist())) for r in going]
        call(user.forget)
        call(user.put, 1, [(*r.token_ids, *r.generated) for r in rest], bundle)
        before = call(user.counts).get("computed_tokens", 0)
        second = call(user.answer, rest)
        joined = {key: tuple(np.concatenate([a, b]) for a, b in zip(first[key], second[key], strict=True)) for key in second}
        assert_same(joined, {key: whole[key] for key in joined})
        beside += call(user.counts)["computed_tokens"] - before - sum(len(second[r.key][0]) for r in going)
    return beside


@pytest.mark.parametrize("drafts", [False, True])
def test_a_cut_sequence_continues_on_another_engine_with_its_pages(world: World, drafts: bool) -> None:
    """The other engine computes one token of what was there before, and the response is the uncut one. With drafts too: those that
    were refused are overwritten before a page is whole."""
    asked = requests(0.0 if drafts else 1.0, seed=3)
    user, maker = (world.engine(f"{name} that drafts", speculation="on") if drafts else world.engine(name) for name in ("user", "prefill"))
    beside = go_on_elsewhere(world, maker, user, asked, (1, 7, 15))
    if drafts:  # those are computed too
        assert call(user.counts)["loaded"] > 0 and call(maker.drafted) > 0
    else:
        assert beside == 0


def test_engines_of_different_widths_use_each_others_pages(wide_world: World) -> None:
    """A page of an engine of two members has the bytes of one of a single member, whose heads they divide."""
    narrow, wide = wide_world.engine("narrow"), wide_world.engine("wide", tensor_parallel=2)
    assert call(narrow.kind) == call(wide.kind)
    asked = requests(1.0, seed=3)
    for maker, user in ((narrow, wide), (wide, narrow), (wide, wide)):
        assert go_on_elsewhere(wide_world, maker, user, asked, (7,)) == 0
        assert call(user.counts)["loaded"] > 0


def test_members_that_do_not_divide_the_heads_keep_no_pages(world: World) -> None:
    assert "do not divide its KV by heads" in call(world.engine("two of one head", tensor_parallel=2).refused)


def test_pages_of_another_dtype_or_block_size_are_refused(world: World) -> None:
    asked = requests()
    _, bundle = pages_of(world, asked)
    other = world.engine("other", dtype="bfloat16", block_size=2 * BLOCK)
    assert call(other.kind).fingerprint != call(world.engine("user").kind).fingerprint
    assert call(other.put, 1, [request.token_ids for request in asked], bundle) == {"foreign": len(bundle.addresses)}
