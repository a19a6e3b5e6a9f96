"""The learner's view of a policy: log-probabilities of response tokens equal the whole model's, without dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_reference import load, logprobs, sequences
from tiny_policy import VOCABULARY, random_batch, tiny_policy

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.micro_batch_tensors import padded
from rlhfless_ray.learn.model_checks import WITH_ROUTERS, check_routers
from rlhfless_ray.learn.policy_model import TokenLogprobs, check_head, load_divided, load_model
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.layout import padded_share
from rlhfless_ray.weights.model_folder import DividedFiles, write_folder
from rlhfless_ray.weights.shards import share_of
from rlhfless_ray.weights.tensor_file import read_header_bytes
from rlhfless_ray.weights.tensor_slice import Slices
from tests.rollout import families


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_padded_logprobs_equal_one_sequence_at_a_time(tmp_path: Path, tied: bool, temperature: float) -> None:
    files = tiny_policy(1, tied=tied)
    batch = random_batch(np.random.default_rng(2))
    wrapped = TokenLogprobs(load_model(write_folder(tmp_path, files), "float32", False)).train()
    indices = np.array([5, 0, 11, 7])
    tensors = padded(batch, indices, torch.device("cpu"))
    with torch.no_grad():
        found, entropy = wrapped(temperature, **tensors)
    every, model = sequences(batch), load(files)
    starts = np.concatenate([[0], np.cumsum(batch.response_lengths)])
    for i in indices:
        mine = (tensors["sequence"] == int(i)).nonzero().squeeze(1)
        with torch.no_grad():
            torch.testing.assert_close(found[mine], logprobs(model, every[i], temperature), rtol=0, atol=1e-5)
        np.testing.assert_array_equal(tensors["flat"][mine], np.arange(starts[i], starts[i + 1]))
    assert len(found) == batch.response_lengths[indices].sum()
    assert ((entropy > 0) & (entropy < np.log(VOCABULARY) + 1e-5)).all()


def test_entropy_is_that_of_the_sampling_distribution(tmp_path: Path) -> None:
    batch = random_batch(np.random.default_rng(3))
    model = load_model(write_folder(tmp_path, tiny_policy()), "float32", False)
    tensors = padded(batch, np.array([2]), torch.device("cpu"))
    with torch.no_grad():
        _, entropy = TokenLogprobs(model)(0.5, **tensors)
        logits = model(tensors["ids"]).logits[0, tensors["columns"]] / 0.5
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


def test_dropout_is_off_in_training_mode(tmp_path: Path) -> None:
    """The tiny policy's config asks for 10 % attention dropout; sampler and learner would compute different policies."""
    folder = write_folder(tmp_path, tiny_policy())
    ids = torch.arange(2, 40)[None]
    model = load_model(folder, "float32", False).train()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, model(ids).logits, rtol=0, atol=0)
        torch.testing.assert_close(model(ids).logits, load(tiny_policy())(ids).logits, rtol=0, atol=0)


def changed_heads() -> list[Any]:
    """Models that change their head's outputs: by a soft cap that small logits feel, a divisor, a factor."""
    import transformers as t

    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape |= {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return [
        t.Gemma2ForCausalLM(t.Gemma2Config(**shape, head_dim=32, final_logit_softcapping=0.05)),
        t.GraniteForCausalLM(t.GraniteConfig(**shape, logits_scaling=0.1)),
        t.CohereForCausalLM(t.CohereConfig(**shape, logit_scale=9.0)),
        t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=1, n_positions=64)),
    ]


@pytest.mark.parametrize("number", range(4), ids=["gemma2", "granite", "cohere", "gpt2"])
def test_other_architectures(number: int) -> None:
    """GPT-2 keeps its layers under another name; the others do more to their logits than a linear head."""
    model = changed_heads()[number].eval()
    check_head(model)
    ids = torch.arange(2, 12)[None]
    columns = torch.arange(4, 9)
    with torch.no_grad():
        places = {"rows": torch.zeros(5, dtype=torch.long), "columns": columns, "targets": ids[0, columns + 1]}
        found, _ = TokenLogprobs(model)(1.0, ids=ids, **places)
        whole = torch.log_softmax(model(ids).logits[0], -1)
        plain = torch.log_softmax(model.get_output_embeddings()(model.base_model(ids).last_hidden_state)[0], -1)
    torch.testing.assert_close(found, whole[columns, ids[0, columns + 1]])
    assert (number == 3) == torch.allclose(found, plain[columns, ids[0, columns + 1]], atol=1e-4)


def test_a_head_that_is_not_known_is_refused() -> None:
    class Squared(type(changed_heads()[3])):  # type: ignore[misc]
        def forward(self, *arguments: Any, **more: Any) -> Any:
            out = super().forward(*arguments, **more)
            out.logits = out.logits**2
            return out

    model = changed_heads()[3]
    model.__class__ = Squared
    with pytest.raises(UserError, match="Squared changes its logits"):
        check_head(model)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", WITH_ROUTERS)
def test_routers_are_balanced_as_transformers_does(tmp_path: Path, family: str, recomputed: bool) -> None:
    """The loss over what is no padding, and its gradient in every router."""
    model = load_model(write_folder(tmp_path, families.policy(family)), "float32", False)
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rows = [np.array([0]), np.array([4]), np.array([7])]
    tensors = padded(random_batch(np.random.default_rng(3)), rows, torch.device("cpu"))
    assert not tensors["seen"].all()
    policy = TokenLogprobs(model, balances=True).train()
    *_, found = policy(1.0, **tensors)
    found.backward()
    routers = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    gates = [name for name in routers if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    model.zero_grad()
    wanted = model(tensors["ids"], attention_mask=tensors["seen"].long(), use_cache=False, output_router_logits=True).aux_loss
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    wanted.backward()
    for name in gates:
        torch.testing.assert_close(routers[name], model.get_parameter(name).grad, rtol=1e-4, atol=1e-7)
    with torch.no_grad():
        assert len(policy(1.0, **tensors)) == 2, "passes need none"


def test_a_policy_without_routers_has_no_loss_of_theirs() -> None:
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "algorithm": {"loss": {"router_aux": 0.01}}})
    with pytest.raises(UserError, match=r"algorithm.loss.router_aux: models of type qwen2 have no routers"):
        check_routers(recipe, {"model_type": "qwen2"})
    check_routers(recipe, {"model_type": "olmoe"})


def test_folders_without_the_weights_of_a_causal_lm_are_refused(tmp_path: Path) -> None:
    files = tiny_policy(tied=False)
    config = json.loads(bytes(files["config.json"]))
    more = {**config, "num_hidden_layers": 9}
    folder = write_folder(tmp_path / "kinds", {**files, "config.json": json.dumps(more).encode()})
    with pytest.raises(UserError, match=r"policy.path: it cannot be loaded as a causal language model: .*`num_hidden_layers` \(9\)"):
        load_model(folder, "float32", False)
    folder = write_folder(tmp_path / "more", {**files, "config.json": json.dumps({**more, "layer_types": None}).encode()})
    with pytest.raises(UserError, match=r"teacher.path: its weights do not fit its config.json: model.layers.\d.*is missing"):
        load_model(folder, "float32", False, "teacher.path")
    folder = write_folder(tmp_path / "wider", {**files, "config.json": json.dumps({**config, "vocab_size": 999}).encode()})
    with pytest.raises(UserError, match=r"policy.path: its weights do not fit its config.json: lm_head.weight .*another shape"):
        load_model(folder, "float32", False)
    folder = write_folder(tmp_path / "alien", {**files, "config.json": json.dumps({"model_type": "alien"}).encode()})
    with pytest.raises(UserError, match=r"policy.path: it cannot be loaded as a causal language model: "):
        load_model(folder, "float32", False)


@pytest.mark.parametrize(("family", "parts"), [("llama", [1]), ("gpt2", [1]), ("mixtral", [1, 0, 1]), ("llama transposed", [1, 0, 1])])
def test_a_rank_loads_its_part_unless_the_file_has_other_tensors(family: str, parts: list[int]) -> None:
    """The experts of a mixture are one tensor in the model, of which this rank's part lies in the files of others. So does that of a
    transposed matrix, also of a square one."""
    from transformers.core_model_loading import Transpose, WeightConverter

    family, _, is_transposed = family.partition(" ")
    name = "self_attn.q_proj.weight"

    def load(folder: Path) -> Any:
        model = load_model(folder, "float32", False, maps=True)
        if is_transposed:
            model._weight_conversions = [WeightConverter(name, name, operations=[Transpose(0, 1)])]
        return model

    files, fetched = families.policy(family), []
    weights = files.pop("model.safetensors")

    def fetch(rank: int) -> dict[str, Slices]:
        fetched.append(rank)
        return {"model.safetensors": share_of(weights, rank, 2)}

    divided = DividedFiles(files, {"model.safetensors": read_header_bytes(weights)}, fetch, 1, 2)
    model, whole = load_divided(divided, load), load_divided({**files, "model.safetensors": weights}, load)
    assert fetched == parts
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        own = slice(*padded_share(one.numel(), 2, 1))
        assert torch.equal(one.reshape(-1)[own], other.reshape(-1)[own])
    assert all(map(torch.equal, model.parameters(), whole.parameters())) == (len(parts) > 1)
