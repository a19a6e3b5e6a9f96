"""Adapters in the learner's gang: against peft and plain torch, on any number of ranks, merged for engines, and as a folder."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_reference import CriticReference
from learner_reference import Reference, load, logprobs, sequences, with_adapters
from peft import PeftModel
from safetensors.torch import load as load_tensors
from test_learner import distance, same
from tiny_policy import VOCABULARY, random_batch, tiny_policy

from rlhfless_ray.cli import lora_combiner
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn import logprobs as logprobs_module
from rlhfless_ray.learn.lora import LoraAdapters, live_name, saved_name
from rlhfless_ray.learn.micro_batch_tensors import padded
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_critic
from rlhfless_ray.recipe import LoraConfig
from rlhfless_ray.weights.adapter import CONFIG, with_base
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.shards import shard_name, slices_in
from tests.learn.conftest import marked

SECTION = LoraConfig(rank=3, alpha=7)
OPTIMIZER = [shard_name("optimizer", rank, 2) for rank in (0, 1)]


@pytest.fixture(scope="module")
def by_peft(cases: Any) -> Any:
    """case → first weights, and weights and loss after each update, of the reference."""

    @lru_cache
    def of(name: str) -> tuple[dict[str, np.ndarray], list[tuple[dict[str, np.ndarray], float]]]:
        case = cases.first(1)[name]
        reference = Reference(case["files"], case["settings"])
        start, wanted = reference.weights(), []
        for batch in case["batches"]:
            stats = reference.update(batch)
            wanted.append((reference.weights(), float(np.mean([s["loss"] for s in stats]))))
        return start, wanted

    return of


@pytest.mark.parametrize(("name", "ranks"), marked(*(f"lora/{stage}" for stage in range(4)), "bf16 lora/2", "bf16 lora/3"))
def test_published_weights_equal_peft_merged(cases: Any, by_peft: Any, name: str, ranks: int) -> None:
    """After every update, on every number of ranks and ZeRO stage; only the adapted weights have moved."""
    half = name.startswith("bf16")
    start, wanted = by_peft("bf16 lora/2" if half else "lora/0")
    ends = ("q_proj.weight", "embed_tokens.weight") if half else ("proj.weight",)
    found = cases.result(name, ranks)
    for got, told, (weights, loss) in zip(found["weights"], found["stats"], wanted, strict=True):
        assert distance(got, weights, start) < (0.2 if half else 3e-4)
        assert told.loss == pytest.approx(loss, abs=0.02 if half else 1e-6)
        assert all(np.array_equal(got[k], start[k]) != k.endswith(ends) for k in start)


@pytest.mark.parametrize(("name", "ranks"), marked("critic lora/0", "critic lora/3"))
def test_the_critic_has_adapters_too(cases: Any, name: str, ranks: int, tmp_path: Path) -> None:
    """Its head is one of the linear layers, as in OpenRLHF. The reference steps what peft made of the same model."""
    case, found = cases.first(1)[name], cases.result(name, ranks)
    section = case["settings"].lora.model_dump()
    made = load_critic(write_folder(tmp_path, case["files"]), "float32", False, "score", 3).eval()
    start = {name: x.detach().numpy().copy() for name, x in made.named_parameters()}
    adapted = with_adapters(made, section, 3, None)
    reference = CriticReference(case["files"], case["settings"], start["score.weight"])
    named = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    reference.take_over(named, lambda ids: adapted.base_model.model.model(ids).last_hidden_state[0], adapted.base_model.model.score)
    assert any("score.lora_A" in name for name in named)
    for batch in case["batches"]:
        reference.update(batch)
    wanted = {name: p.detach().numpy() for name, p in adapted.merge_and_unload().named_parameters()}
    assert distance(found["weights"][-1], wanted, start) < 1e-3
    whole = {name: tensor for content in found["model"].values() for name, tensor in load_tensors(content).items()}
    assert same({name: x.numpy() for name, x in whole.items()}, found["weights"][-1])


@pytest.mark.parametrize(("name", "ranks"), marked("dropped/0", "dropped/3", "dropped narrow/0"))
def test_dropout_is_that_of_a_sequence_whatever_it_is_batched_with(cases: Any, name: str, ranks: int) -> None:
    """Ranks, ZeRO stage, micro-batches and recomputed activations change nothing."""
    start = {name: x.numpy() for name, x in load_tensors(cases.files["model.safetensors"]).items()}
    found, one = cases.result(name, ranks), cases.result("dropped/0", 1)
    assert distance(found["weights"][-1], one["weights"][-1], start) < 5e-4


def test_old_log_probabilities_know_no_dropout(cases: Any) -> None:
    one = cases.result("dropped/0", 1)
    start = {name: x.numpy() for name, x in load_tensors(cases.files["model.safetensors"]).items()}
    without = cases.result("lora/0", 1)
    assert distance(one["weights"][0], without["weights"][0], start) > 0.1
    model, batch = load(cases.files), cases.batches[1]  # what the engines sampled the second batch with, so to say
    model.load_state_dict({name: torch.from_numpy(x) for name, x in one["weights"][0].items()})
    with torch.no_grad():
        old = [logprobs(model, s, 1.0).numpy() for s in sequences(batch)]
    apart = np.split(np.abs(np.concatenate(old) - batch.logprobs), np.cumsum([len(part) for part in old])[:-1])
    half = len(apart) // 2  # two updates, each with half of the samples
    means = [np.concatenate(part).mean() for part in (apart[:half], apart[half:])]
    assert one["stats"][1].mismatch_mean == pytest.approx(np.mean(means), rel=1e-5)
    assert one["stats"][1].mismatch_max == pytest.approx(max(part.max() for part in apart), rel=1e-5)


def test_dropout_of_the_head_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the forward pass nor in the backward pass, which computes the chunks again."""
    section = SECTION.model_copy(update={"target_modules": ["lm_head", "v_proj"], "dropout": 0.4})
    model, batch = load(tiny_policy()), random_batch(np.random.default_rng(4))
    lora, policy = LoraAdapters(model, section, 2), TokenLogprobs(model)
    trainable = {name: p for name, p in model.named_parameters() if lora.is_trained(name)}
    torch.manual_seed(0)
    for parameter in trainable.values():
        torch.nn.init.normal_(parameter, std=0.2)
    sequences = np.array([7, 0, 3])
    tensors, found = padded(batch, sequences, torch.device("cpu")), []
    for tokens in (1000, 1, 7):  # in a chunk
        monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", 4 * VOCABULARY * tokens)
        with lora.dropping(batch, sequences, [1]):
            logprobs, _ = policy(1.0, **tensors)
            found.append([logprobs.detach(), *torch.autograd.grad(logprobs.square().mean(), trainable.values())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)
    plain, _ = policy(1.0, **tensors)
    assert float((plain.detach() - found[0][0]).abs().max()) > 0.01


def test_a_snapshot_is_an_adapter_that_peft_loads_and_the_combiner_merges(cases: Any, tmp_path: Path) -> None:
    found = cases.result("lora/3", 2)
    files = found["snapshots"][1]
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors", *OPTIMIZER, "learner.json"}
    moments = list(slices_in(files[name] for name in OPTIMIZER))
    assert moments and all(".lora_" in name for name in moments)
    base, folder = write_folder(tmp_path / "base", cases.files), tmp_path / "adapter"
    write_folder(base, {"tokenizer.json": b"{}"})
    write_folder(folder, {**files, CONFIG: with_base(files[CONFIG], str(base))})
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    merged = PeftModel.from_pretrained(load(cases.files), folder).merge_and_unload()
    by_peft = {name: p.detach().numpy() for name, p in merged.named_parameters()}
    lora_combiner.combine(base, folder, tmp_path / "out", False, "float32")
    combined = load_tensors((tmp_path / "out" / "model.safetensors").read_bytes())
    for name, published in found["weights"][0].items():
        np.testing.assert_allclose(published, by_peft[name], atol=1e-7)
        np.testing.assert_array_equal(published, combined[name].numpy())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.lora_A.default.weight", "model.embed_tokens.lora_embedding_B.default"])
def test_names_come_back(name: str) -> None:
    assert live_name(saved_name(name)) == name and "default" not in saved_name(name)


def test_adapters_off_is_the_base_and_the_seed_decides_where_they_begin() -> None:
    ids = torch.arange(2, 40)[None]
    plain = load(tiny_policy())
    first = []
    for seed in (1, 1, 2):
        model = load(tiny_policy())
        lora = LoraAdapters(model, SECTION, seed)
        first.append(dict(model.named_parameters())["model.layers.1.mlp.up_proj.lora_A.default.weight"].detach())
        assert {name for name, p in model.named_parameters() if p.requires_grad} == {
            name for name, _ in model.named_parameters() if lora.is_trained(name)
        }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-2)
        with lora.off():
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


@pytest.mark.parametrize(
    ("targets", "tied", "said"),
    [
        (["q_prj"], False, "q_prj"),
        (["embed_tokens"], True, "another layer"),
        (["q_proj", "lm_head"], True, "another layer"),
        (["self_attn"], False, ""),
    ],
)
def test_layers_that_are_not_there_or_cannot_be_merged(targets: list[str], tied: bool, said: str) -> None:
    with pytest.raises(UserError, match=rf"^lora\.target_modules: .*{said}"):
        LoraAdapters(load(tiny_policy(tied=tied)), SECTION.model_copy(update={"target_modules": targets}), 0)
