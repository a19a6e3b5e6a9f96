"""Drawing a token from logits and a uniform number: exactly the inverse of the cumulative distribution."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

pytestmark = pytest.mark.engine  # the module imports vLLM


def probabilities(logits: torch.Tensor, temperature: float) -> np.ndarray:
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(sampling: ModuleType, temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -40.0, 0.5])
    count = 20_000
    uniform = torch.from_numpy(np.random.default_rng(3).random(count))
    tokens, _ = sampling.draw(logits.expand(count, -1), torch.full((count,), temperature), uniform)
    expected = probabilities(logits, temperature)
    seen = np.bincount(tokens.numpy(), minlength=6)
    assert seen[4] == 0
    possible = expected > 1e-6
    assert chisquare(seen[possible], count * expected[possible] / expected[possible].sum()).pvalue > 1e-3


def test_a_token_is_drawn_exactly_in_its_interval(sampling: ModuleType) -> None:
    """Just inside both ends of every token's piece of [0, 1), and not in the neighbours'."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    edges = np.concatenate([[0.0], np.cumsum(probabilities(logits, 0.8))])
    inside = 1e-6  # the log-probabilities are float32
    uniform = np.concatenate([edges[:-1] + inside, edges[1:] - inside])
    expected = np.tile(np.arange(50), 2)
    rows = logits.expand(len(uniform), -1)
    tokens, _ = sampling.draw(rows, torch.full((len(uniform),), 0.8), torch.from_numpy(uniform))
    assert (np.diff(edges) > 3 * inside).all()
    np.testing.assert_array_equal(tokens.numpy(), expected)


def test_the_intervals_stay_in_place_over_a_large_vocabulary(sampling: ModuleType) -> None:
    logits = torch.randn(1, 150_000, generator=torch.Generator().manual_seed(2))
    edges = np.cumsum(probabilities(torch.log_softmax(logits[0], -1), 1.0))
    uniform = np.random.default_rng(0).random(400)
    tokens, _ = sampling.draw(logits.expand(400, -1), torch.ones(400), torch.from_numpy(uniform))
    expected = np.searchsorted(edges, uniform, side="right")
    assert (tokens.numpy() == expected).mean() > 0.99
    assert np.abs(tokens.numpy() - expected).max() <= 1


@given(st.integers(0, 2**32), st.floats(0.2, 3.0), st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_log_probability_is_that_of_the_drawn_token(sampling: ModuleType, seed: int, temperature: float, uniform: float) -> None:
    logits = 4 * torch.randn(1, 33, generator=torch.Generator().manual_seed(seed))
    tokens, logprobs = sampling.draw(logits, torch.tensor([temperature]), torch.tensor([uniform], dtype=torch.float64))
    expected = np.log(probabilities(logits[0], temperature))[int(tokens)]
    assert float(logprobs) == pytest.approx(expected, abs=2e-5)


def test_the_ends_of_the_unit_interval_draw_possible_tokens(sampling: ModuleType) -> None:
    logits = torch.tensor([-float("inf"), 0.0, 1.0, -float("inf")])
    uniform = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    tokens, logprobs = sampling.draw(logits.expand(2, -1), torch.ones(2), uniform)
    assert tokens.tolist() == [1, 2]
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("size", [33, 4096, 5000, 128 * 50])
def test_blocks_draw_what_one_cumulative_distribution_draws(sampling: ModuleType, size: int) -> None:
    """Also where most tokens, whole blocks and the last ones have no probability."""
    generator = torch.Generator().manual_seed(size)
    logits = 6 * torch.randn(300, size, generator=generator)
    rare = torch.rand(size, generator=generator) < 0.95
    rare[size // 3] = False
    logits[100:200, rare] = -torch.inf
    logits[200:, 17:-9] = logits[200:, -3:] = -torch.inf
    uniform = torch.rand(300, dtype=torch.float64, generator=generator)
    uniform[::7], uniform[1::7] = 0.0, np.nextafter(1.0, 0.0)
    probabilities = torch.softmax(logits, -1)
    tokens = sampling.invert(probabilities, uniform).numpy()
    edges = probabilities.double().cumsum(-1).numpy()
    assert (probabilities.numpy()[np.arange(300), tokens] > 0).all()
    wanted = np.array([np.searchsorted(row, u * row[-1], side="right") for row, u in zip(edges, uniform.numpy(), strict=True)])
    last = (edges < edges[:, -1:]).sum(-1)
    same = tokens == np.minimum(wanted, last)
    assert same[np.arange(300) % 7 > 1].mean() > 0.99, "but for numbers at the ends of the interval, where the rarest tokens are"
    near = np.abs(edges[np.arange(300), tokens] - edges[np.arange(300), np.minimum(wanted, last)])
    assert near.max() < 1e-6, "sums of blocks are rounded"


def test_temperature_zero_is_the_argmax_at_temperature_one(sampling: ModuleType) -> None:
    """Also beside rows that are sampled."""
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(5))
    temperature = torch.tensor([0.0, 1.0] * 4)
    uniform = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    tokens, logprobs = sampling.draw(logits, temperature, uniform)
    greedy = temperature == 0
    assert torch.equal(tokens[greedy], logits[greedy].argmax(-1))
    torch.testing.assert_close(logprobs[greedy], torch.log_softmax(logits[greedy], -1).max(-1).values)
    alone, _ = sampling.draw(logits[~greedy], temperature[~greedy], uniform[~greedy])
    assert torch.equal(tokens[~greedy], alone)


@given(st.integers(0, 2**64 - 1), st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=50, deadline=None)
def test_a_stream_does_not_depend_on_how_much_of_it_is_asked_for(sampling: ModuleType, seed: int, some: int, more: int) -> None:
    """A request that is cut after `some` tokens goes on with the noise it would have had."""
    whole = sampling.draw_uniforms(seed, some + more)
    np.testing.assert_array_equal(whole, np.random.Generator(np.random.Philox(key=seed)).random(some + more))
    np.testing.assert_array_equal(sampling.draw_uniforms(seed, some), whole[:some])
    np.testing.assert_array_equal(sampling.draw_uniforms(seed, more, some), whole[some:])
    assert ((whole >= 0) & (whole < 1)).all()


def test_streams_of_neighbouring_seeds_are_unrelated(sampling: ModuleType) -> None:
    streams = np.stack([sampling.draw_uniforms(seed, 2000) for seed in range(20)])
    correlation = np.corrcoef(streams)[np.triu_indices(20, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(2000)
    assert len(np.unique(streams)) == streams.size
    counts = np.histogram(streams, bins=50, range=(0, 1))[0]
    assert chisquare(counts).pvalue > 1e-3


def runner_of(requests: dict[str, tuple[dict[str, Any], list[int]]], batch: list[str]) -> SimpleNamespace:
    """What the sampler reads of vLLM's model runner. requests: {id: (extra_args, tokens so far)}."""
    made = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra, max_tokens=9), output_token_ids=output, num_prompt_tokens=3)
        for name, (extra, output) in requests.items()
    }
    return SimpleNamespace(requests=made, input_batch=SimpleNamespace(req_ids=batch), num_spec_tokens=3)


def test_rows_follow_the_batch_when_it_changes(sampling: ModuleType) -> None:
    """vLLM removes, adds and reorders the requests of its batch; every request keeps its noise, position and key."""
    outputs: dict[int, list[int]] = {key: [0] * (key % 3) for key in range(10, 20)}
    runner = runner_of({str(key): ({"key": key, "seed": key, "temperature": 1.0}, outputs[key]) for key in outputs}, [])
    sampler = sampling.KeyedSampler(runner)

    def step(*names: str) -> list[int]:
        runner.input_batch.req_ids = list(names)
        sampler.reset_counts()
        drawn = sampler(logits=torch.zeros(len(names), 1000), sampling_metadata=None).sampled_token_ids
        keys, positions, _ = sampler.records[-1]
        assert drawn.shape == (len(names), 1) and drawn.dtype == torch.int32 and keys.tolist() == [int(name) for name in names]
        for key, position, token in zip(keys.tolist(), positions.tolist(), drawn[:, 0].tolist(), strict=True):
            assert position == len(outputs[key])
            assert token == int(sampling.draw_uniforms(key, 9)[position] * 1000)
        return [sampler.running, sampler.new_tokens, sampler.context_tokens]

    assert step("10", "11", "12") == [3, 3 * 3 + 1 + 2 + 0, 3 * 3 + 1 + 2 + 0]
    outputs[11].append(5)  # vLLM's own list: the position moves with it
    assert step("12", "11", "13") == [3, 2 + 3 + 1, 3 * 3 + 0 + 3 + 1]
    assert step("10") == [1, 3 + 1, 3 + 1], "one that left the batch, as when it is preempted, is computed again"
    assert list(sampler.rows) == ["10"]


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_drafts_change_no_token_and_no_log_probability(sampling: ModuleType, seed: int, rows: list[tuple[int, int]]) -> None:
    """A step with drafts draws what as many steps without them draw. rows: drafted tokens of each sequence, and how many are right."""
    words, rng = 13, np.random.default_rng(seed)
    names = [str(i) for i in range(len(rows))]
    extra = [{"key": i, "seed": seed + i, "temperature": float(rng.choice([0.0, 0.7, 1.0])), "top_p": 0.9} for i in range(len(rows))]
    outputs: list[list[int]] = [[0] * int(rng.integers(0, 3)) for _ in rows]
    logits = [torch.randn(drafted + 1, words, generator=torch.Generator().manual_seed(seed + i)) for i, (drafted, _) in enumerate(rows)]

    runner = runner_of({name: (one, list(output)) for name, one, output in zip(names, extra, outputs, strict=True)}, names)
    single = sampling.KeyedSampler(runner)
    tokens: list[list[int]] = [[] for _ in rows]
    for step in range(max(drafted for drafted, _ in rows) + 1):
        runner.input_batch.req_ids = [name for name, (drafted, _) in zip(names, rows, strict=True) if step <= drafted]
        drawn = single(logits=torch.stack([logits[int(name)][step] for name in runner.input_batch.req_ids]), sampling_metadata=None)
        for name, token in zip(runner.input_batch.req_ids, drawn.sampled_token_ids[:, 0].tolist(), strict=True):
            tokens[int(name)].append(token)
            runner.requests[name].output_token_ids.append(token)
    wanted = {(key, at): value for key, at, value in zip(*(part.tolist() for part in single.take()), strict=True)}

    drafts = []
    for i, (drafted, right) in enumerate(rows):
        drafts += [tokens[i][j] if j < right else (tokens[i][j] + 1) % words for j in range(drafted)]
    runner = runner_of({name: (one, list(output)) for name, one, output in zip(names, extra, outputs, strict=True)}, names)
    sampler = sampling.KeyedSampler(runner)
    metadata = SimpleNamespace(num_draft_tokens=[drafted for drafted, _ in rows], draft_token_ids=torch.tensor(drafts, dtype=torch.int32))
    if drafts:
        found = sampler.verify(metadata, None, torch.cat(logits), None).sampled_token_ids
    else:
        found = sampler(logits=torch.cat(logits), sampling_metadata=None).sampled_token_ids
    kept = [min(drafted, right) + 1 for drafted, right in rows]
    assert [[token for token in row if token >= 0] for row in found.tolist()] == [one[:k] for one, k in zip(tokens, kept, strict=True)]
    got = {(key, at): value for key, at, value in zip(*(part.tolist() for part in sampler.take()), strict=True)}
    begins = [len(output) for output in outputs]
    assert got == {place: value for place, value in wanted.items() if place[1] < begins[place[0]] + kept[place[0]]}
    assert sampler.tried == {str(i): (drafted, kept[i] - 1) for i, (drafted, _) in enumerate(rows) if drafted}


@pytest.mark.parametrize("offset", [0, 2])
def test_before_the_least_tokens_what_ends_a_response_is_masked_as_vllm_masks_it(sampling: ModuleType, offset: int) -> None:
    """Against vLLM's own processor, with rows that are over it, that never had it, and that went on elsewhere (`offset`)."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    theirs = MinTokensLogitsProcessor(SimpleNamespace(), torch.device("cpu"), False)  # type: ignore[arg-type]
    ends, outputs, requests, others = [3, 7], [[], [5], [5, 5, 5], []], {}, []
    for i, (output, least) in enumerate(zip(outputs, [1 + offset, 3 + offset, 3 + offset, 0], strict=True)):
        extra = {"key": i, "seed": i, "temperature": 0.8, "offset": offset, "min_tokens": least, "ends": [*ends, 10**6]}
        requests[str(i)] = extra, output
        own = SamplingParams(min_tokens=max(0, least - offset), stop_token_ids=ends, max_tokens=9)
        own._all_stop_token_ids = set(ends)
        others.append((i, own, [1, 2], output))
    sampler = sampling.KeyedSampler(runner_of(requests, list(requests)))
    theirs.update_state(BatchUpdate(batch_size=4, removed=[], added=others, moved=[]))
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    logits[:, 3] += 6  # or the mask would hardly be seen
    masked = theirs.apply(logits.clone())
    assert torch.isneginf(masked).sum(-1).tolist() == [2, 2, 0, 0]
    noise = torch.tensor([sampling.draw_uniforms(i, 9, offset)[len(output)] for i, output in enumerate(outputs)])
    tokens, logprobs = sampling.draw(masked, torch.full((4,), 0.8), noise)
    drawn = sampler(logits=logits.clone(), sampling_metadata=None).sampled_token_ids[:, 0]
    assert torch.equal(drawn, tokens) and torch.equal(sampler.records[-1][2], logprobs)
    free = torch.log_softmax(logits[0] / 0.8, -1)
    gap = -torch.log1p(-free[ends].exp().sum())  # by so much the learner's log-probability is smaller
    assert float(logprobs[0] - free[tokens[0]]) == pytest.approx(float(gap), abs=1e-5) and gap > 0.5


def test_what_was_drawn_is_handed_out_once_in_order(sampling: ModuleType) -> None:
    sampler = sampling.KeyedSampler(None)
    assert [len(part) for part in sampler.take()] == [0, 0, 0]
    for position in range(3):
        logprobs = torch.tensor([-1.0 - position, -10.0 - position])
        sampler.records.append((np.array([7, 8]), np.full(2, position), logprobs))
    sampler.records.append((np.array([7]), np.array([2]), torch.tensor([-9.0])))  # drawn again
    keys, positions, logprobs = sampler.take()
    assert keys.tolist() == [7, 8, 7, 8, 7, 8, 7] and positions.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert logprobs.tolist() == [-1, -10, -2, -11, -3, -12, -9] and logprobs.dtype == np.float32
    assert len(sampler.take()[0]) == 0


@given(st.integers(0, 2**32), st.floats(0.3, 2.0), st.floats(0.05, 1.0), st.integers(0, 33), st.floats(0, 1, exclude_max=True))
@settings(max_examples=120, deadline=None)
def test_top_k_and_top_p_draw_from_the_tokens_that_are_left(
    sampling: ModuleType, seed: int, temperature: float, top_p: float, top_k: int, uniform: float
) -> None:
    """Against a loop over sorted tokens, with vLLM's own masking as a second opinion on which are left."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = 3 * torch.randn(1, 29, generator=torch.Generator().manual_seed(seed))
    p = probabilities(logits[0], temperature)
    kept: list[int] = []
    candidates = sorted(range(29), key=lambda token: -p[token])[: top_k or 29]
    reached = top_p * sum(p[candidates])  # of what top-k leaves
    for token in candidates:
        if kept and top_p < 1 and sum(p[kept]) >= reached - 1e-6:
            break
        kept.append(token)
    if top_p < 1 and abs(sum(p[kept]) - reached) < 1e-5:
        return  # rounding decides
    mask = np.isin(np.arange(29), kept)
    assert np.array_equal(sampling.nucleus(torch.from_numpy(np.log(p))[None], torch.tensor([top_p]), torch.tensor([top_k]))[0], mask)
    by_vllm = apply_top_k_top_p_pytorch(
        (logits / temperature).clone(), torch.tensor([min(top_k or 29, 29)]), torch.tensor([top_p]) if top_p < 1 else None
    )
    assert np.array_equal(torch.isfinite(by_vllm[0]), mask)
    q = np.where(mask, p, 0) / p[mask].sum()
    rows = logits.expand(3, -1)
    tokens, logprobs = sampling.draw(
        rows,
        torch.tensor([temperature, temperature, 0.0]),
        torch.full((3,), uniform, dtype=torch.float64),
        sampling.Truncation(torch.tensor([top_p, 1.0, top_p]), torch.tensor([top_k, 0, top_k])),
    )
    wanted = int(np.searchsorted(np.cumsum(q), uniform, side="right"))
    if abs(np.cumsum(q) - uniform).min() > 1e-5:
        assert int(tokens[0]) == wanted
    assert float(logprobs[0]) == pytest.approx(np.log(q[int(tokens[0])]), abs=3e-5)
    assert float(logprobs[1]) == pytest.approx(np.log(p[int(tokens[1])]), abs=3e-5), "another row's distribution is its own"
    assert int(tokens[2]) == int(np.argmax(p))
    assert float(logprobs[2]) == pytest.approx(np.log(probabilities(logits[0], 1.0)[int(tokens[2])]), abs=3e-5)


@pytest.mark.parametrize("left", [(1.0, 0), (0.7, 0), (1.0, 9)])
def test_rows_are_drawn_from_in_chunks_as_all_at_once(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch, left: tuple[float, int]
) -> None:
    """What is held while a token is drawn does not grow with the rows."""
    rows, words = 11, 64
    logits = torch.randn(rows, words, generator=torch.Generator().manual_seed(5))
    temperature, uniform = torch.tensor([0.0, 0.7, 1.0] * 4)[:rows], torch.from_numpy(np.random.default_rng(6).random(rows))
    cut = sampling.Truncation.of([left] * rows, logits.device)
    whole, seen = sampling.draw(logits, temperature, uniform, cut), []
    draw = sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda x, *more: (seen.append(len(x)), draw(x, *more))[1])
    monkeypatch.setattr(sampling, "CHUNK_BYTES", 4 * 4 * words)
    tokens, logprobs = sampling.draw_in_chunks(logits, temperature, uniform, cut)
    assert seen == [4, 4, 3]
    assert torch.equal(tokens, whole[0]) and torch.equal(logprobs, whole[1])


def test_an_engine_on_a_device_takes_the_model_runner_that_the_sampler_is_made_for(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Triton finds no device, as here, there is no other; where it does, the other one is the default and refuses this sampler."""
    import os

    import vllm.config.vllm as config
    import vllm.envs as envs

    from rlhfless_ray.engine import prepare_vllm

    asked = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None), _get_v2_model_runner_unsupported_features=lambda: [])

    def second() -> bool:
        return config.VllmConfig.use_v2_model_runner.fget(asked)

    monkeypatch.setattr(config, "HAS_TRITON", True)
    # once there is an engine in a process, vLLM reads the environment no more
    monkeypatch.setattr(envs, "__getattr__", getattr(envs.__getattr__, "__wrapped__", envs.__getattr__))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert second()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # somebody's wish for other engines
    prepare_vllm.prepare()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0" and not second()


@pytest.mark.parametrize(("on_cpu", "eager", "float32"), [(True, "1", None), (False, None, "ieee")])
def test_an_engine_on_a_device_compiles_and_multiplies_in_float32(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch, on_cpu: bool, eager: str | None, float32: str | None
) -> None:
    import os

    from rlhfless_ray.engine import prepare_vllm

    for name in {**prepare_vllm.ENVIRONMENT, **prepare_vllm.EAGER, **prepare_vllm.ON_GPU}:
        monkeypatch.delenv(name, raising=False)
    prepare_vllm.prepare(on_cpu)  # vLLM is loaded already: only what it finds around it changes
    assert os.environ.get("TORCHDYNAMO_DISABLE") == eager and os.environ.get("TRITON_F32_DEFAULT") == float32
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    for name in {**prepare_vllm.ENVIRONMENT, **prepare_vllm.EAGER, **prepare_vllm.ON_GPU}:  # the monkeypatch does not know these
        os.environ.pop(name, None)
