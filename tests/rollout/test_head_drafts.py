"""EAGLE-3 heads draft the same tokens as in vLLM, independent of earlier steps, and are refused for other policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from asking import FILES, answer, assert_same, requests, weights_of
from safetensors.numpy import load, save

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.model_folder import write_folder
from tests.conftest import small_recipe

DRAFTED = 3


@pytest.mark.engine
@pytest.mark.parametrize("draft_vocabulary", [None, 40])
def test_head_drafts_the_same_tokens_as_vllm(new_engine: Callable[..., Any], tmp_path: Path, draft_vocabulary: int | None) -> None:
    """Compare drafts after each token of greedy responses. All prompts differ, because tokens of a cached prefix have no states."""
    from tiny_head import tiny_head

    head = tiny_head(FILES["A"]["config.json"], draft_vocabulary=draft_vocabulary)
    asked = requests(12, temperature=0.0, seed=3)[::2]
    engine, engine_without_drafts = new_engine(FILES["A"], head, speculation="on"), new_engine(FILES["A"])
    for one in (engine, engine_without_drafts):
        one.load(1, weights_of(FILES["A"]))
    found: dict[tuple[int, ...], list[int]] = {}
    source = engine.drafter.source
    propose = source.propose

    def propose_and_record(asks: Any, passes: int) -> Any:
        drafts = propose(asks, passes)
        found.update({tuple(ask.tokens.tolist()): draft.tokens[:DRAFTED] for ask, draft in zip(asks, drafts, strict=True) if ask.most >= 4})
        return drafts

    source.propose = propose_and_record
    assert_same(answer(engine, asked), answer(engine_without_drafts, asked))
    wanted = _drafts_of_vllm(write_folder(tmp_path / "policy", FILES["A"]), write_folder(tmp_path / "head", head), asked)
    common = found.keys() & wanted.keys()
    assert len(common) > 60 and {tokens: found[tokens] for tokens in common} == {tokens: wanted[tokens] for tokens in common}
    assert len({tuple(draft) for draft in found.values()}) > 10, "drafts must differ for the comparison to mean anything"


def _drafts_of_vllm(policy: Path, head: Path, asked: list[Any]) -> dict[tuple[int, ...], list[int]]:
    """Return the drafts of vLLM's own proposer by the tokens so far."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    from rlhfless_ray.engine.prepare_vllm import prepare

    prepare(architectures=json.loads((head / "config.json").read_text())["architectures"])  # or another Python looks at the class, for 11 s
    arguments: dict[str, Any] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTED}
    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(policy),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=320,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=True,
            distributed_executor_backend="uni",
            speculative_config=arguments,
        )
    )
    engine.engine_core._finalizer.detach()  # as in the fixture `new_engine`
    runner = engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    propose, proposed = runner.propose_draft_token_ids, []

    def propose_and_record(*args: Any, **options: Any) -> Any:
        drafts = propose(*args, **options)
        proposed.append((list(runner.input_batch.req_ids), drafts.tolist()))
        return drafts

    runner.propose_draft_token_ids = propose_and_record
    prompts = {str(one.key): one.token_ids for one in asked}
    for one in asked:
        params = SamplingParams(temperature=0.0, max_tokens=one.max_tokens, detokenize=False)
        engine.add_request(str(one.key), {"prompt_token_ids": list(one.token_ids)}, params)
    found: dict[tuple[int, ...], list[int]] = {}
    while engine.has_unfinished_requests():
        responses = {output.request_id: tuple(output.outputs[0].token_ids) for output in engine.step()}
        for names, drafts in proposed:
            keys = [name.rpartition("-")[0] for name in names]  # vLLM appends a random number
            found |= {prompts[key] + responses[key]: draft for key, draft in zip(keys, drafts, strict=True) if key in responses}
        proposed.clear()
    return found


@pytest.mark.engine
@pytest.mark.parametrize("seed", range(6))
def test_drafts_do_not_depend_on_the_steps_before(sampling: ModuleType, tmp_path: Path, seed: int) -> None:
    """Simulate rejected drafts, steps without drafts, sequences that leave and return, and gaps, after which a context starts over."""
    import torch
    from tiny_head import LAYERS, tiny_head

    from rlhfless_ray.engine.head_drafts import HeadSource
    from rlhfless_ray.engine.model_drafts import Ask

    rng = np.random.default_rng(seed)
    config = json.loads(FILES["A"]["config.json"])
    folder = write_folder(tmp_path, tiny_head(FILES["A"]["config.json"], seed, embeddings=True))
    source = HeadSource(folder, 200, torch.float32, torch.device("cpu"), embed=lambda tokens: None)
    size, longest = config["hidden_size"], 60
    states = {name: torch.tensor(rng.normal(size=(len(LAYERS), longest, size)), dtype=torch.float32) for name in range(4)}
    tokens = {name: rng.integers(0, config["vocab_size"], longest) for name in range(4)}
    done = dict.fromkeys(range(4), 0)  # positions with states
    begins = dict.fromkeys(range(4), 0)  # of the context
    compared = 0
    for _ in range(40):
        batch = [name for name in done if rng.random() < 0.9 and done[name] < longest - 12]
        if not batch:
            break
        left = [name for name in done if name not in batch]
        new = [int(rng.integers(1, 6)) for _ in batch]
        for name in left:
            begins[name] = done[name]  # the step did not compute it, so its context is dropped
        accepted = [int(rng.integers(1, count + 1)) for count in new]
        rows = [torch.randn(len(LAYERS), count, size) for count in new]
        for row, name, count in zip(rows, batch, accepted, strict=True):
            row[:, :count] = states[name][:, done[name] : done[name] + count]  # the other states are of rejected tokens
        source.observe(batch, [done[name] for name in batch], [0, *np.cumsum(new).tolist()], list(torch.cat(rows, 1)))
        for name, count in zip(batch, accepted, strict=True):
            done[name] += count
        asks = []
        for name in batch:
            if rng.random() < 0.6 and source.fits(name, tokens[name][: done[name] + 1], 3):
                asks.append(Ask(name, tokens[name][: done[name] + 1], np.zeros(8), 3, 0.0, (1.0, 0)))
        if not asks:
            continue
        for ask, draft in zip(asks, source.propose(asks, 3), strict=True):
            begin = begins[ask.name]
            assert draft.tokens == _drafted(source.head, ask.tokens[begin:], states[ask.name][:, begin : done[ask.name]], begin)
            compared += 1
    assert compared > 20


def _drafted(head: Any, tokens: np.ndarray, states: Any, begin: int) -> list[int]:
    """Return three greedy tokens, each computed from the whole context without a cache."""
    import torch

    with torch.inference_mode():
        read = head.fc(torch.cat(list(states), -1))[None]
        drafted = torch.tensor(tokens)[None]
        for _ in range(3):
            count = read.shape[1]
            mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
            positions = begin + torch.arange(count)[None]
            output = head(head.embed_tokens(drafted[:, 1:]), read, positions, mask)[:, -1:]
            drafted = torch.cat([drafted, head.logits(output).argmax(-1)], 1)
            read = torch.cat([read, output], 1)
    return drafted[0, -3:].tolist()


@pytest.mark.engine
def test_old_unread_states_are_dropped(sampling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from tiny_head import LAYERS, tiny_head

    from rlhfless_ray.engine import head_drafts

    monkeypatch.setattr(head_drafts, "KEPT_STATES", 8)
    folder = write_folder(tmp_path, tiny_head(FILES["A"]["config.json"], embeddings=True))
    source = head_drafts.HeadSource(folder, 200, torch.float32, torch.device("cpu"), embed=lambda tokens: None)
    size = source.head.config.hidden_size
    for position in range(50):
        source.observe([3], [position], [0, 1], [torch.zeros(1, size)] * len(LAYERS))
        track = source.tracks[3]
        assert track.end == position + 1 and min(position + 1, 8) <= track.unread <= 16
    source.observe([3, 4], [50, 0], [0, 1, 13], [torch.zeros(13, size)] * len(LAYERS))
    assert source.tracks[3].waiting[-1].untyped_storage().nbytes() == 4 * size, "the states of the other sequence must not be kept"
    source.observe(list(range(17)), [0] * 17, list(range(18)), [torch.zeros(17, size)] * len(LAYERS))
    assert not source.tracks, "no states are kept with more sequences than can be drafted for"


@pytest.mark.engine
def test_vllm_returns_hidden_states_of_exactly_these_policies(sampling: ModuleType) -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    from rlhfless_ray.engine.head_config import POLICIES

    for name in POLICIES:
        assert supports_eagle3(ModelRegistry.models[name].load_model_cls()), name
    for name in ("Gemma2ForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "Gemma3ForCausalLM"):
        assert not supports_eagle3(ModelRegistry.models[name].load_model_cls()), name


def _config(**changes: Any) -> dict[str, Any]:
    plain = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 61}
    return {**plain, **changes}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "it is of type LlamaForCausalLMEagle; heads must be EAGLE-3"),
        ({"model_type": "deepseek_v3"}, "EAGLE-3 with a Llama layer"),
        ({"fc_norm": True}, "the head has fc_norm, which is not supported"),
        ({"num_hidden_layers": 2}, "the head has 2 layers"),
        ({"vocab_size": 60}, "its vocab_size 60 is not the policy's 61"),
        ({"target_hidden_size": 128}, "hidden states of size 128, and the policy's have 64"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, "it reads layer 3 of a policy with 2 layers"),
    ],
)
def test_a_head_of_another_policy_is_refused(changes: dict[str, Any], why: str | None) -> None:
    from rlhfless_ray.engine.head_config import is_head, refusal

    policy = json.loads(FILES["A"]["config.json"])
    assert is_head(_config(**changes)) and not is_head(policy)
    found = refusal(_config(**changes), policy)
    assert found is None if why is None else why in (found or "")
    assert "no hidden states of a MixtralForCausalLM" in (refusal(_config(), {**policy, "architectures": ["MixtralForCausalLM"]}) or "")


def test_reading_the_folder_of_a_head(tmp_path: Path) -> None:
    """A head needs no tokenizer. Engines of several members get the policy's embeddings. Folders without a head's weights are refused."""
    from rlhfless_ray.rollout.speculation import read_drafter

    size = 64
    tensors = {name: np.ones((2, 2), np.float32) for name in ("fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight")}

    def read(**rollout: Any) -> Any:
        folder = write_folder(tmp_path / "head", {"config.json": json.dumps(_config()).encode(), "model.safetensors": save(tensors)})
        changes = {f"rollout__{key}": value for key, value in {"drafter": str(folder), "speculation": "auto", **rollout}.items()}
        return read_drafter(Recipe.parse(small_recipe(tmp_path, **changes)), None, FILES["A"])

    assert read().keys() == {"config.json", "model.safetensors"}
    added = load(bytes(read(tensor_parallel=2)["embeddings.safetensors"]))
    assert added["embed_tokens.weight"].shape == (61, size)
    with pytest.raises(UserError, match=r"^rollout.drafter_train: an EAGLE head is trained before a run"):
        read(drafter_train="on")
    del tensors["fc.weight"]
    with pytest.raises(UserError, match=r"^rollout.drafter: the head has no fc.weight"):
        read()
