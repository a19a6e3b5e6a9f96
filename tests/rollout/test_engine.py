"""A real vLLM engine on CPU, against transformers and the learner's own forward pass."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from asking import BLOCK, FILES, TIED, VERSIONS, answer, assert_same, put, requests, weights_of
from learner_reference import load, logprobs
from tiny_policy import EOS, VOCABULARY, tiny_policy

from rlhfless_ray.types import Completion, Request

pytestmark = pytest.mark.engine


def torch_logprobs(model: torch.nn.Module, request: Request, done: Completion, temperature: float) -> np.ndarray:
    ids = torch.tensor([*request.token_ids, *done.token_ids.tolist()])
    with torch.no_grad():
        return logprobs(model, {"ids": ids, "prompt": len(request.token_ids)}, temperature).numpy()


@pytest.fixture(scope="module")
def bare(new_engine: Callable[..., Any]) -> Any:
    return new_engine(FILES["A"])


@pytest.fixture(scope="module")
def engine(bare: Any) -> Any:
    """With weights A; tests that load others put A back under a new version."""
    with pytest.raises(RuntimeError, match="no weights"):
        answer(bare, requests(1))
    put(bare, weights_of(FILES["A"]))
    return bare


@pytest.fixture
def with_a(engine: Any) -> Iterator[Any]:
    yield engine
    put(engine, weights_of(FILES["A"]))


@pytest.fixture(scope="module")
def small(new_engine: Callable[..., Any]) -> Any:
    """Another engine, for weights B only at first: fewer sequences at once, other blocks, too small a cache."""
    made = new_engine(FILES["B"], max_running=20, block_size=2 * BLOCK, kv_cache_mb=1)
    put(made, weights_of(FILES["B"]))
    return made


@pytest.fixture(scope="module")
def answers(engine: Any) -> dict[int, Completion]:
    return answer(engine, requests())


# ---- log-probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_equal_the_learners(engine: Any, temperature: float, record_property: Callable[..., None]) -> None:
    asked = requests(temperature=temperature)
    model = load(FILES["A"])
    worst = 0.0
    for key, done in answer(engine, asked).items():
        assert done.logprobs.dtype == np.float32 and len(done.logprobs) == len(done.token_ids) > 0
        expected = torch_logprobs(model, asked[key], done, temperature)
        worst = max(worst, float(np.abs(done.logprobs - expected).max()))
    record_property("largest_mismatch", worst)
    print(f"T = {temperature}: largest mismatch {worst:.1e}")
    assert worst < 1e-4


def test_samples_follow_the_policy(engine: Any) -> None:
    """First tokens over many seeds, against the policy's probabilities."""
    from scipy.stats import chisquare

    prompt, count = (5, 9, 17), 1500
    asked = [Request(i, prompt, 10_000 + i, 1, 1.0) for i in range(count)]
    seen = np.bincount([int(done.token_ids[0]) for done in answer(engine, asked).values()], minlength=VOCABULARY)
    with torch.no_grad():
        expected = torch.softmax(load(FILES["A"])(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy() * count
    order = np.argsort(expected)
    bins = np.array_split(order, 20)  # at least five expected in each
    assert min(expected[b].sum() for b in bins) > 5
    assert chisquare([seen[b].sum() for b in bins], [expected[b].sum() for b in bins]).pvalue > 1e-3


def test_top_p_holds_for_a_request_whatever_runs_beside_it(engine: Any) -> None:
    """Tokens of its nucleus, with log-probabilities in it; the others' are of the whole distribution."""
    asked = [replace(r, top_p=0.6 if r.key % 2 else 1.0) for r in requests(12, temperature=0.8)]
    model, checked = load(FILES["A"]), 0
    for key, done in answer(engine, asked).items():
        ids = torch.tensor([[*asked[key].token_ids, *done.token_ids.tolist()]])
        with torch.no_grad():
            every = torch.softmax(model(ids).logits[0, len(asked[key].token_ids) - 1 : -1].double() / 0.8, -1).numpy()
        for p, token, logprob in zip(every, done.token_ids, done.logprobs, strict=True):
            more_likely = float(p[p > p[token]].sum())
            whole = 1.0
            if key % 2:
                assert more_likely < 0.6 + 1e-5
                sums = np.cumsum(np.sort(p)[::-1])
                whole = float(sums[np.searchsorted(sums, 0.6)])
                if np.abs(sums - 0.6).min() < 1e-5:
                    continue  # rounding decides
            assert logprob == pytest.approx(np.log(p[token] / whole), abs=1e-4)
            checked += 1
    assert checked > 100


def test_samples_of_top_k_follow_its_distribution(engine: Any) -> None:
    """First tokens over many seeds, against the renormalised probabilities of the most likely ones. Greedy requests ignore top-k."""
    from scipy.stats import chisquare

    prompt, count, top_k = (5, 9, 17), 1500, 12
    asked = [Request(i, prompt, 20_000 + i, 1, 1.0, top_k=top_k) for i in range(count)]
    found = answer(engine, asked)
    with torch.no_grad():
        p = torch.softmax(load(FILES["A"])(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
    likeliest = np.argsort(-p)[:top_k]
    expected = p[likeliest] / p[likeliest].sum()
    seen = np.array([sum(int(done.token_ids[0]) == token for done in found.values()) for token in likeliest])
    assert seen.sum() == count, "no other token is drawn"
    assert chisquare(seen, expected * count).pvalue > 1e-3
    for done in found.values():
        assert done.logprobs[0] == pytest.approx(np.log(expected[likeliest == done.token_ids[0]][0]), abs=1e-4)
    greedy = requests(6, temperature=0.0)
    assert_same(answer(engine, [replace(one, top_k=1 + one.key) for one in greedy]), answer(engine, greedy))


def test_greedy_equals_transformers(engine: Any) -> None:
    asked = requests(temperature=0.0)
    model = load(FILES["A"])
    for key, done in answer(engine, asked).items():
        ids = torch.tensor([asked[key].token_ids])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0)
        np.testing.assert_array_equal(done.token_ids, whole[0, ids.shape[1] :].numpy())
        np.testing.assert_allclose(done.logprobs, torch_logprobs(model, asked[key], done, 1.0), atol=1e-4)


def test_tied_embeddings_and_bfloat16(new_engine: Callable[..., Any]) -> None:
    """A published tied policy has no head of its own. In bfloat16 weights travel as float32, which holds them exactly."""
    for files, dtype, bound in ((TIED, "float32", 1e-4), (tiny_policy(6, dtype="bfloat16", spread=0.15), "bfloat16", 0.1)):
        weights = weights_of(files)
        made = new_engine(files, dtype=dtype)
        put(made, weights)
        asked = requests(6)
        model = load(files, getattr(torch, dtype))
        done = answer(made, asked)
        apart = [np.abs(done[r.key].logprobs - torch_logprobs(model, r, done[r.key], 1.0)) for r in asked]
        assert ("lm_head.weight" in weights) == (files is not TIED)
        assert np.concatenate(apart).max() < bound
        assert np.concatenate(apart).mean() < bound / 5


# ---- independence -----------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_batching_or_order(engine: Any, answers: dict[int, Completion]) -> None:
    asked = requests()
    alone = {}
    for request in asked[:4]:
        alone |= answer(engine, [request])
    assert_same(alone, {key: answers[key] for key in alone})
    assert_same(answer(engine, asked[::-1], interval_s=0.0), answers)
    mixed = [asked[i] for i in np.random.default_rng(1).permutation(len(asked))]
    assert_same(answer(engine, mixed[:5]) | answer(engine, mixed[5:6]) | answer(engine, mixed[6:]), answers)


def test_the_cache_has_the_size_that_was_asked_for(bare: Any, small: Any) -> None:
    token_bytes = 2 * 2 * 32 * 4  # keys and values of two layers, one head of 32, float32
    for engine, megabytes in ((bare, 64), (small, 1)):
        config = engine.engine.vllm_config.cache_config
        assert config.num_gpu_blocks * config.block_size * token_bytes == megabytes * 2**20


def test_samples_do_not_depend_on_the_engine(small: Any, with_a: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer at once, other blocks, and a cache so small that sequences are thrown out and computed again."""
    asked = [replace(r, max_tokens=120) for r in long_requests(10)]
    put(with_a, weights_of(FILES["B"]))
    thrown_out: list[Any] = []
    scheduler = small.engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda r, *a, **k: (thrown_out.append(r), preempt(r, *a, **k)))
    assert_same(answer(small, asked), answer(with_a, asked))
    assert thrown_out


def test_long_prompts_in_pieces(engine: Any) -> None:
    """More prompt tokens than one engine step takes: vLLM cuts prompts, and draws for their pieces must not count."""
    budget = engine.engine.vllm_config.scheduler_config.max_num_batched_tokens
    rng = np.random.default_rng(4)
    count = budget // 280 + 3
    asked = [Request(i, tuple(rng.integers(2, VOCABULARY, 280).tolist()), i, 5, 1.0) for i in range(count)]
    engine.take_stats()
    done = answer(engine, asked)
    assert sum(len(r.token_ids) for r in asked) > budget
    model = load(FILES["A"])
    for request in asked[:: max(1, count // 8)]:
        expected = torch_logprobs(model, request, done[request.key], 1.0)
        np.testing.assert_allclose(done[request.key].logprobs, expected, atol=1e-4)


def test_another_seed_is_another_sample(engine: Any, answers: dict[int, Completion]) -> None:
    asked = [replace(r, seed=r.seed + 1) for r in requests()]
    other = answer(engine, asked)
    assert all(not np.array_equal(other[key].token_ids, answers[key].token_ids) for key in other)


# ---- versions ---------------------------------------------------------------------------------------------------


def long_requests(seed: int) -> list[Request]:
    """Every test has prompts of its own: one that the engine has seen under other weights would hide what is looked for."""
    made = [r for r in requests(96, seed=seed) if len(r.token_ids) > 2 * BLOCK]
    assert len(made) == 32
    return made


def test_a_new_version_never_sees_old_kv(small: Any, with_a: Any) -> None:
    """Weights A, then B, the same prompts: what comes out is what an engine gives that never knew A."""
    asked = long_requests(11)
    put(small, weights_of(FILES["B"]))
    fresh = answer(small, asked)
    old = answer(with_a, asked)
    version = put(with_a, weights_of(FILES["B"]))
    new = answer(with_a, asked)
    assert_same(new, fresh)
    assert {done.version for done in new.values()} == {version} != {done.version for done in old.values()}
    assert any(not np.array_equal(old[key].token_ids, new[key].token_ids) for key in old)


def test_without_the_salt_it_would(small: Any, with_a: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before has teeth: with one salt for all versions the old KV is served, and the samples are others."""
    monkeypatch.setattr("rlhfless_ray.engine.vllm_engine.salt", lambda version: "always the same")
    asked = long_requests(12)
    put(small, weights_of(FILES["B"]))
    fresh = answer(small, asked)
    answer(with_a, asked)
    put(with_a, weights_of(FILES["B"]))
    stale = answer(with_a, asked)
    different = [key for key in fresh if not np.array_equal(stale[key].token_ids, fresh[key].token_ids)]
    assert len(different) > len(fresh) / 2
    alike = [k for k in fresh if stale[k].token_ids[0] == fresh[k].token_ids[0]]
    firsts = [abs(stale[k].logprobs[0] - fresh[k].logprobs[0]) for k in alike]
    assert max(firsts, default=1.0) > 1e-3


def test_prefixes_are_shared_within_a_version(engine: Any) -> None:
    """The cache works at all: a repeated long prompt is not computed again."""
    asked = [replace(r, seed=5, max_tokens=1) for r in long_requests(13)[:1]]
    put(engine, weights_of(FILES["A"]))
    cached = []
    for _ in range(2):
        request = asked[0]
        from vllm import SamplingParams, TokensPrompt

        extra = {"key": request.key, "seed": 5, "temperature": 1.0}
        prompt = TokensPrompt(prompt_token_ids=list(request.token_ids), cache_salt=f"version {engine.version}")
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args=extra)
        engine.engine.add_request("0", prompt, params)
        outputs: list[Any] = []
        while engine.engine.has_unfinished_requests():
            outputs += engine.engine.step()
        cached.append(outputs[-1].num_cached_tokens)
        engine.sampler.take()
    assert cached == [0, len(asked[0].token_ids) // BLOCK * BLOCK]


def test_weights_are_copied_and_repeatable(with_a: Any, answers: dict[int, Completion]) -> None:
    """There and back again; and what happens to the caller's arrays afterwards does not matter."""
    put(with_a, weights_of(FILES["B"]))
    assert any(not np.array_equal(d.token_ids, answers[k].token_ids) for k, d in answer(with_a, requests()).items())
    mine = {name: array.copy() for name, array in weights_of(FILES["A"]).items()}
    version = put(with_a, mine)
    assert all(np.array_equal(mine[name], array) for name, array in weights_of(FILES["A"]).items())
    for array in mine.values():
        array[...] = 7.0
    again = answer(with_a, requests())
    assert_same(again, answers)
    assert {done.version for done in again.values()} == {version}


# ---- the ends of responses and the engine's reports -----------------------------------------------------------------


def test_finish_reasons(engine: Any, answers: dict[int, Completion]) -> None:
    stopped = {key: done for key, done in answers.items() if done.finish_reason == "stop"}
    cut = {key: done for key, done in answers.items() if done.finish_reason == "length"}
    assert stopped and cut and len(stopped) + len(cut) == len(answers)
    for done in stopped.values():
        assert done.token_ids[-1] == EOS and EOS not in done.token_ids[:-1]
    for done in cut.values():
        assert len(done.token_ids) == 40 and EOS not in done.token_ids
    key, done = max(stopped.items(), key=lambda item: len(item[1].token_ids))
    length = len(done.token_ids)
    assert length > 1
    by_max = {n: answer(engine, [replace(requests()[key], max_tokens=n)])[key] for n in (length - 1, length, length + 1)}
    assert {n: d.finish_reason for n, d in by_max.items()} == {length - 1: "length", length: "stop", length + 1: "stop"}
    assert [len(d.token_ids) for d in by_max.values()] == [length - 1, length, length]


def test_no_response_ends_before_its_least_tokens(engine: Any) -> None:
    """Those that would have ended there go on; the others are the same to the bit but for the first log-probability, which is of the
    distribution without the end token."""
    asked = requests(200, seed=4, longest=6)
    free, held = answer(engine, asked), answer(engine, [replace(r, min_tokens=1) for r in asked])
    model, empty = load(FILES["A"]), 0
    for key, done in held.items():
        ids = torch.tensor([asked[key].token_ids])
        with torch.no_grad():
            p_end = float(torch.softmax(model(ids).logits[0, -1].double(), -1)[EOS])
        assert done.token_ids[0] != EOS
        expected = torch_logprobs(model, asked[key], done, 1.0)
        assert done.logprobs[0] == pytest.approx(expected[0] - np.log1p(-p_end), abs=1e-4)
        np.testing.assert_allclose(done.logprobs[1:], expected[1:], atol=1e-4)
        empty += int(free[key].token_ids[0]) == EOS
    assert empty > 0, "without the setting some are empty"


def test_several_stop_tokens(tmp_path: Any) -> None:
    from rlhfless_ray.engine.engine_arguments import read_stop_tokens

    assert read_stop_tokens(tmp_path, None) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 3, "vocab_size": 9}')
    assert read_stop_tokens(tmp_path, None) == read_stop_tokens(tmp_path, 3) == [3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert read_stop_tokens(tmp_path, None) == [4, 5]
    assert read_stop_tokens(tmp_path, 8) == [4, 5, 8] and read_stop_tokens(tmp_path, 9) == [4, 5], "9 is beyond the vocabulary"
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_stop_tokens(tmp_path, None) == [3]


def test_the_tokenizers_end_ends_a_response(bare: Any, new_engine: Callable[..., Any]) -> None:
    """Also if the model's configuration has another one, as after chat tuning of a base model."""
    other = {**FILES["A"], "config.json": FILES["A"]["config.json"].replace(b'"eos_token_id": %d' % EOS, b'"eos_token_id": null')}
    assert other["config.json"] != FILES["A"]["config.json"]
    found = []
    for engine in (bare, new_engine(other, end_token_id=EOS)):
        put(engine, weights_of(FILES["A"]))
        found.append(answer(engine, requests(8, seed=5)))
    assert_same(*found)
    assert any(one.token_ids[-1] == EOS for one in found[0].values())


def test_tokens_are_streamed(engine: Any, answers: dict[int, Completion]) -> None:
    """Every token once and in place, with its log-probability; the transcript would raise at a gap or a repetition."""
    asked = requests()
    assert_same(answer(engine, asked, interval_s=0.0), answers)
    parts = list(engine.generate(asked, interval_s=0.0))
    assert len(parts) == max(len(done.token_ids) for done in answers.values())
    assert all((part.counts == 1).all() for part in parts)
    rest = list(engine.generate(asked))
    assert [len(part) for part in rest] == [len(asked)] and (rest[0].ends > 0).all()
    assert [part for part in engine.generate([])] == []


def test_a_model_that_vllm_cannot_build_is_named(new_engine: Callable[..., Any]) -> None:
    """vLLM raises a pydantic error, which no process can send to another."""
    from transformers import MptConfig

    config = MptConfig(d_model=64, n_heads=2, n_layers=2, max_seq_len=320, vocab_size=VOCABULARY, architectures=["MptForCausalLM"])
    with pytest.raises(RuntimeError, match=r"vLLM \S+ cannot build MptForCausalLM on CPU .*not supported") as error:
        new_engine({"config.json": config.to_json_string(use_diff=False).encode()})
    assert "\n" not in str(pickle.loads(pickle.dumps(error.value)))


def test_step_records(engine: Any) -> None:
    asked = requests()
    engine.take_stats()
    done = answer(engine, asked)
    steps = engine.take_stats().steps
    assert engine.take_stats().steps == []
    tokens = sum(len(d.token_ids) for d in done.values())
    assert sum(step.running for step in steps) == tokens
    assert steps[0].running == len(asked)
    assert steps[0].context_tokens == sum(len(r.token_ids) for r in asked) == steps[0].new_tokens
    assert all(step.new_tokens == step.running for step in steps[1:])
    assert steps[1].context_tokens == steps[0].context_tokens + len(asked)
    assert all(step.seconds > 0 for step in steps)


def test_an_abandoned_rollout_leaves_nothing_behind(engine: Any, answers: dict[int, Completion]) -> None:
    """A caller that stops listening half-way: the next rollout, with the same keys, is not disturbed."""
    listening = engine.generate([replace(r, seed=r.seed + 1, token_ids=r.token_ids[:1]) for r in requests()], interval_s=0.0)
    next(listening)
    listening.close()
    assert not engine.engine.has_unfinished_requests()
    assert_same(answer(engine, requests()), answers)


def test_incomplete_weights_are_refused(with_a: Any) -> None:
    """vLLM would leave what was there, with a warning."""
    weights = weights_of(FILES["B"])
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks 1 of the engine's weights, .*down_proj"):
        with_a.load(next(VERSIONS), weights)
    with pytest.raises(RuntimeError, match="no weights"):
        answer(with_a, requests(1))
