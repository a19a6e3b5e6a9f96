"""What a policy's config says of its context and of what its sequences take, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.weights.load_policy import (
    PLAIN_ATTENTION,
    check_classifier,
    check_files,
    check_kv_cache,
    context_tokens,
    first_supervised_policy,
    kv_cache_bytes,
    model_folder,
)
from rlhfless_ray.weights.model_folder import read_folder, split_files, stored_weights, write_folder
from rlhfless_ray.weights.tiny_model import scratch_policy
from tests.conftest import small_recipe


def config(**values: Any) -> dict[str, bytes]:
    return {"config.json": json.dumps(values).encode()}


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({"model_type": "qwen2", "max_position_embeddings": 512}, 512),
        ({"model_type": "gpt2", "n_positions": 128}, 128),
        ({"model_type": "gpt2"}, 1024),  # GPT-2's default, which a config need not repeat
        ({"model_type": "mpt", "max_seq_len": 300}, 300),
        ({"model_type": "of-my-own", "max_seq_len": 99, "seq_length": 77}, 77),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 777}}, 777),
        ({"model_type": "of-my-own", "text_config": {"n_ctx": 55}}, 55),
        ({"model_type": "bloom"}, None),  # linear biases: no longest sequence
    ],
)
def test_the_context_is_found_under_every_family_s_name(values, tokens):
    assert context_tokens(config(**values)) == tokens


def test_a_prompt_longer_than_a_gpt2_type_policy_s_context_is_refused_before_ray(tmp_path):
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    files["config.json"] = json.dumps({"model_type": "gpt2", "n_positions": 32}).encode()
    tree = small_recipe(tmp_path, policy__path=str(write_folder(tmp_path / "policy", files)))
    with pytest.raises(UserError, match=r"rollout.max_tokens = 24 exceed the policy's context of 32 tokens"):
        Runtime(Recipe.parse(tree))


def test_a_missing_shard_is_named_before_ray(tmp_path):
    """It would not be missed before the learner has loaded the model, and then as a tensor."""
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    whole = dict(stored_weights(files))
    shards = split_files(whole, most_bytes=sum(tensor.nbytes for tensor in whole.values()) // 2)
    lost = sorted(shards)[1]
    del files["model.safetensors"]
    folder = str(write_folder(tmp_path / "policy", {**files, **{name: shard for name, shard in shards.items() if name != lost}}))
    for key, tree in (
        ("policy.path", small_recipe(tmp_path, policy__path=folder)),
        ("critic.path", small_recipe(tmp_path, critic__path=folder, algorithm__advantage={"estimator": "gae"})),
        ("reward.model_path", small_recipe(tmp_path, reward__function="", reward__model_path=folder)),
    ):
        with pytest.raises(UserError, match=f"{key}: {lost} is missing, which"):
            Runtime(Recipe.parse(tree))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors.index.json", b"{", "model.safetensors.index.json names no weights files; copy it again"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "model.safetensors.index.json names no weights files"),
        ("generation_config.json", b"[", "generation_config.json is no JSON object"),
        ("generation_config.json", b'{"eos_token_id": ["x"]}', "generation_config.json is no JSON object with numbers as `eos_token_id`"),
    ],
)
def test_files_that_only_a_worker_would_miss_are_named(name: str, content: bytes, said: str) -> None:
    whole = {"config.json": b'{"model_type": "qwen2"}', "generation_config.json": b'{"eos_token_id": [1, 2]}'}
    check_files(whole)
    with pytest.raises(UserError, match=f"^policy.path: {said}"):
        check_files({**whole, name: content})


def test_a_weight_that_one_layer_lacks_and_shards_without_an_index_are_named_before_ray(tmp_path: Path) -> None:
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    whole = dict(stored_weights(files))
    lost = "model.layers.1.mlp.down_proj.weight"
    shards = split_files(whole, most_bytes=sum(tensor.nbytes for tensor in whole.values()) // 2)
    del files["model.safetensors"], shards["model.safetensors.index.json"]
    cases = {
        f"its weights do not fit its config.json: {lost} is missing": split_files({k: v for k, v in whole.items() if k != lost}),
        "it has neither model.safetensors nor model.safetensors.index.json": shards,
    }
    for number, (said, weights) in enumerate(cases.items()):
        folder = str(write_folder(tmp_path / f"policy{number}", {**files, **weights}))
        with pytest.raises(UserError, match=f"^policy.path: {said}"):
            Runtime(Recipe.parse(small_recipe(tmp_path, policy__path=folder)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "t5"}, "transformers .* has no causal language model of the type `t5`, so it cannot be trained"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "engines cannot run .*: it is no causal language model"),
        ({"model_type": "alien", "auto_map": {"AutoConfig": "own.Own"}}, "only the Python code .*; set policy.trust_remote_code=true"),
    ],
)
def test_a_policy_that_the_learner_cannot_load_is_refused_before_ray(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **changed}).encode()
    tree = small_recipe(tmp_path, policy__path=str(write_folder(tmp_path / "policy", files)))
    with pytest.raises(UserError, match=f"^policy.path: {said}"):
        Runtime(Recipe.parse(tree))


@pytest.mark.slow
def test_a_layer_that_no_model_has_gets_no_adapter(tmp_path: Path) -> None:
    """Beside others it would be ignored. A critic may have layers that the policy lacks."""
    lora = {"learner__zero_stage": 1, "lora__rank": 4}
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    folder = str(write_folder(tmp_path / "policy", files))
    for targets, said in ((["q_proj", "v_prj"], "v_prj"), (["self_attn"], "self_attn"), (["proj"], "proj")):
        tree = small_recipe(tmp_path, policy__path=folder, lora__target_modules=targets, **lora)
        with pytest.raises(UserError, match=f"^lora.target_modules: no layer is called `{said}`; the weights have down_proj, .*q_proj"):
            Runtime(Recipe.parse(tree))
    for targets in (["q_proj", "mlp.up_proj", "score"], ["all-linear"]):
        Runtime(Recipe.parse(small_recipe(tmp_path, policy__path=folder, lora__target_modules=targets, **lora)))


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf{}", b"[" * 100_000, '{"a": "é"}'.encode("latin1")])
def test_a_config_that_transformers_cannot_read_is_named(tmp_path: Path, content: bytes) -> None:
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    folder = write_folder(tmp_path / "policy", {**files, "config.json": content})
    with pytest.raises(UserError, match=r"^policy.path: its config.json is not valid JSON"):
        read_folder(folder)


def test_quantised_weights_of_any_other_model_are_refused_before_ray(tmp_path: Path) -> None:
    """Critic, reference and reward model passed these checks before, and failed once Ray had started. A teacher is read as a reference."""
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    config = {**json.loads(files["config.json"]), "quantization_config": {"quant_method": "fp8"}}
    folder = str(write_folder(tmp_path / "model", {**files, "config.json": json.dumps(config).encode()}))
    for key, more in (
        ("critic.path", {"critic__path": folder, "algorithm__advantage": {"estimator": "gae"}}),
        ("reference.path", {"reference__path": folder, "algorithm__kl": {"coefficient": 0.1}}),
        ("reward.model_path", {"reward__function": "", "reward__model_path": folder}),
    ):
        with pytest.raises(UserError, match=rf"^{key}: its weights are quantised \(fp8\)"):
            Runtime(Recipe.parse(small_recipe(tmp_path, **more)))


def test_types_of_any_other_model_that_transformers_lacks_are_refused_before_ray(tmp_path: Path) -> None:
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "model_type": "alien"}).encode()
    folder = str(write_folder(tmp_path / "model", files))
    for key, more in (
        ("reference.path", {"reference__path": folder, "algorithm__kl": {"coefficient": 0.1}}),
        ("reward.model_path", {"reward__function": "", "reward__model_path": folder}),
    ):
        with pytest.raises(UserError, match=rf"^{key}: transformers .* has no models of the type `alien`, so it cannot be loaded"):
            Runtime(Recipe.parse(small_recipe(tmp_path, **more)))


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"vocab_size": 7}, r"(lm_head|embed_tokens)\.weight is \d+ × 64 instead of 7 × 64"),
        ({"num_key_value_heads": 1}, r"self_attn\.k_proj\.weight is \d+ × 64 instead of"),
        ({"intermediate_size": 100}, r"mlp\.\w+\.weight is .* instead of"),
        ({"num_hidden_layers": 9, "layer_types": None}, "they have 2 layers instead of 9"),
    ],
)
def test_weights_of_another_model_are_named_before_ray(tmp_path: Path, changed: dict[str, int], wrong: str) -> None:
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **changed}).encode()
    tree = small_recipe(tmp_path, policy__path=str(write_folder(tmp_path / "policy", files)))
    with pytest.raises(UserError, match=f"^policy.path: its weights do not fit its config.json: .*{wrong}"):
        Runtime(Recipe.parse(tree))


def test_names_of_experts_and_of_other_families_are_found_or_left_alone() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 0, "vocab_size": 9}
    mixture = {
        **sizes,
        "model_type": "qwen3_moe",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "moe_intermediate_size": 5,
    }
    for name, shape in (("mlp.experts.3.down_proj", (8, 5)), ("mlp.down_proj", (8, 12)), ("mlp.shared_expert.down_proj", (8, 7))):
        weights = split_files({f"model.layers.0.{name}.weight": torch.zeros(shape)})
        check_files({**config(**mixture), **weights})
        check_files({**config(**{key: value for key, value in mixture.items() if key != "num_hidden_layers"}), **weights})
        for unknown in ({"model_type": "deepseek_v3"}, {"quantization_config": {"quant_method": "fp8"}}):
            check_files({**config(**{**mixture, "hidden_size": 4, **unknown}), **weights})
        other = {**config(**{**mixture, "hidden_size": 4}), **weights}
        if "shared" in name:
            check_files(other)
        else:
            with pytest.raises(UserError, match=rf"{name}\.weight is 8 × \d+ instead of 4"):
                check_files(other)


def test_an_adapter_is_no_policy(tmp_path):
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    files["adapter_model.safetensors"] = files["model.safetensors"]
    assert "model.safetensors" in read_folder(write_folder(tmp_path / "both", files))
    for lost in ("model.safetensors", "config.json"):  # peft saves an adapter without a config.json
        del files[lost]
        with pytest.raises(UserError, match="is the folder of an adapter, without its base model"):
            read_folder(write_folder(tmp_path / f"no {lost}", files))


def test_a_cache_too_small_for_the_longest_sequence_is_named_with_what_it_takes(tmp_path):
    tree = small_recipe(tmp_path, policy__hidden_size=512, policy__layers=12, rollout__kv_cache_mb=16, rollout__max_tokens=400)
    recipe = Recipe.parse(tree)
    files = scratch_policy(Recipe.parse({**tree, "policy": {"hidden_size": 512, "layers": 1}}), task("chain"))
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "num_hidden_layers": 12}).encode()
    # 12 layers, a key and a value of 512 numbers of 4 bytes each, 14 blocks of 32 tokens and vLLM's spare one
    assert kv_cache_bytes(files, 417, 32, "float32") == 12 * 2 * 512 * 4 * 15 * 32 == 22.5 * 2**20
    assert kv_cache_bytes(files, 416, 32, "float32") == 12 * 2 * 512 * 4 * 14 * 32
    with pytest.raises(UserError, match=r"rollout.kv_cache_mb: 16 MiB cannot hold one sequence of 417 tokens .* needs 23 MiB;"):
        check_kv_cache(recipe, files, 17)
    check_kv_cache(Recipe.parse({**tree, "rollout": {**tree["rollout"], "kv_cache_mb": 23}}), files, 17)
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": 64}
    for family in PLAIN_ATTENTION:  # what is checked here, the planner can count
        assert kv_cache_bytes(config(model_type=family, **shape), 417, 32, "float32", 4) == 12 * 2 * 4 * 64 * 4 * 15 * 32
    assert kv_cache_bytes(config(model_type="gemma3"), 417, 32, "float32") is None  # sliding windows: the engine decides


def test_a_name_on_the_hub_is_fetched_and_a_folder_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def fetch(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns))
        if name == "org/gone":
            raise ConnectionError("no\nnetwork")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    for name in ("org/here", "/nowhere", "./org/x", "name"):
        assert model_folder(name, "policy.path") == Path(name)
    assert not asked and model_folder("org/there", "policy.path") == tmp_path and asked == [("org/there", True, False)]
    with pytest.raises(UserError, match=r"critic\.path: there is no folder org/gone, and the Hugging Face hub .* \(no network\)"):
        model_folder("org/gone", "critic.path")


def test_a_family_without_a_classifier_is_named() -> None:
    check_classifier({"config.json": b'{"model_type": "gemma"}'})
    check_classifier({"config.json": b'{"model_type": "own", "auto_map": {"AutoConfig": "c.C"}}'})
    with pytest.raises(UserError, match=r"critic\.path: transformers .* has no sequence classifier for models of the type `granite`"):
        check_classifier({"config.json": b'{"model_type": "granite"}'}, "critic.path")


def test_the_policy_of_a_supervised_stage_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree = {"task": "sft", "data": {"task": "chain", "rows": 8}, "policy": {"hidden_size": 64, "layers": 1}}
    recipe = SupervisedRecipe.parse(tree)
    made = first_supervised_policy(recipe)
    assert made == scratch_policy(recipe, task("chain"))
    other = first_supervised_policy(SupervisedRecipe.parse({**tree, "run": {"seed": 5}}))
    assert other["model.safetensors"] != made["model.safetensors"]
    monkeypatch.setattr("rlhfless_ray.weights.tiny_model.scratch_policy", lambda *_: pytest.fail("it is in the cache"))
    assert first_supervised_policy(recipe) == made
